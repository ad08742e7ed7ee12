"""A base's own process: what ends its training is one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.config.load import to_json
from harness.start import base_process
from harness.start.prepare import base_folder
from tests.toy import small_config, small_launch


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
            "CUDA out of memory. Tried to allocate",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            "DataLoader worker (pid 7) is killed by",
        ),
        (ValueError("a folder is damaged"), "a folder is damaged"),
    ],
)
def test_what_ends_a_training_is_one_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, launch = small_config("method=bf16"), small_launch(tmp_path)
    folder = base_folder(config, launch)
    assert folder is not None
    monkeypatch.setattr(base_process, "start_of", Mock(side_effect=error))
    monkeypatch.setattr(signal, "signal", Mock())
    words = json.dumps({"config": to_json(config), "launch": to_json(launch), "end": None})
    assert base_process.train(words) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"failed: {folder.name}: {said}") and err.count("\n") == 1
