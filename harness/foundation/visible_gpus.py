"""The GPUs that a process may use, by the names that CUDA_VISIBLE_DEVICES takes, and whether processes on one of them
take turns."""

from __future__ import annotations

import os
import shutil
from itertools import takewhile
from pathlib import Path

MPS = "nvidia-cuda-mps-control"
"""Command that starts NVIDIA's multi-process service."""
PIPES = Path("/tmp") / "nvidia-mps"
"""Folder of its pipes, unless CUDA_MPS_PIPE_DIRECTORY names another."""


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process sees: those of CUDA_VISIBLE_DEVICES where it is set, else all by number. As
    CUDA reads it, a negative number there hides itself and all that follow."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [*takewhile(lambda name: not name.startswith("-"), filter(None, map(str.strip, given.split(","))))]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # counts by NVML: no context is made


def turns_note(processes: int) -> str | None:
    """A line where so many processes leave GPUs in turns that could be used side by side: where some share one, and
    NVIDIA's multi-process service is installed and not running."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", PIPES))
    if processes < 2 or shutil.which(MPS) is None or (pipes / "control").exists():
        return None
    gpus = len(visible_gpus())
    if not 0 < gpus < processes:
        return None
    return (
        f"{processes} cells at a time on {gpus} GPU{'s' if gpus > 1 else ''} take turns. With NVIDIA's multi-process "
        f"service, started before the sweep, they run side by side: {MPS} -d"
    )
