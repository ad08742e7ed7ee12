"""One GPU per worker: `make test-gpu GPUS=2` runs files side by side, each process on a GPU of its own."""

from __future__ import annotations

import os

import torch


def own_gpu(worker: str | None, visible: str | None, count: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES becomes for pytest-xdist's `worker` ("gw0", ...); None: leave it as it is."""
    if worker is None or count < 2:
        return None
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return names[int(worker.removeprefix("gw")) % len(names)]


# At import, before anything has touched CUDA in this process.
if (chosen := own_gpu(os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES"),
                      torch.cuda.device_count())) is not None:  # fmt: skip
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen
