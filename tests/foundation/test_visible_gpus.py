"""The GPUs of a process, from its environment or the device count."""

from __future__ import annotations

import pytest
import torch

from harness.foundation.visible_gpus import visible_gpus


def test_visible_gpus_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert visible_gpus() == ["2", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus() == ["0", "1", "2"]
