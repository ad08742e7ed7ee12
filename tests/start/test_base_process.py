"""A base's own process: what ends its training is one line."""

from __future__ import annotations

import json
import re
import signal
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.config.load import run_id, to_json
from harness.records.cell_progress import told
from harness.records.paths import work_folder
from harness.start import base_process, prepare
from harness.start.base_training import in_words
from harness.start.prepare import base_folder, start_of
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


def test_a_run_that_trains_its_base_prints_how_far_it_is_and_tells_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "in_words", partial(in_words, every_s=0.0))
    config, launch = small_config("task=sort", "task.n=2", "base.target_accuracy=0.1"), small_launch(tmp_path)
    work = work_folder(tmp_path, run_id(config))
    work.mkdir(parents=True)
    folder = start_of(config, launch).folder
    lines = capsys.readouterr().out.splitlines()
    assert told(work) == (0, lines[-1])
    words = re.compile(rf"{folder.name}: step \d+ of at most 400, accuracy 0\.\d{{3}}")
    assert lines[0].startswith(f"{folder.name}: step 5 of ") and all(map(words.fullmatch, lines))
