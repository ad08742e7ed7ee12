"""The GPUs that a process may use, by the names that CUDA_VISIBLE_DEVICES takes."""

from __future__ import annotations

import os


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process sees: those of CUDA_VISIBLE_DEVICES where it is set, else all by number."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # counts by NVML: no context is made
