"""The GPUs of a process, from its environment or the device count."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from harness.foundation.visible_gpus import turns_note, visible_gpus


def test_visible_gpus_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert visible_gpus() == ["2", "GPU-7"]
    for hidden in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0,-1,2")
    assert visible_gpus() == ["1", "0"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus() == ["0", "1", "2"]


def test_cells_that_take_turns_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No service, two GPUs: three cells take turns, two do not. Where it runs or is not installed, nothing is said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert turns_note(3) == (
        "3 cells at a time on 2 GPUs take turns. With NVIDIA's multi-process service, started before the sweep, they "
        "run side by side: nvidia-cuda-mps-control -d"
    )
    assert turns_note(2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "2 cells at a time on 1 GPU take turns" in (turns_note(2) or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert turns_note(2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert turns_note(2) is None
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "control").touch()
    assert turns_note(2) is None
