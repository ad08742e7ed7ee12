"""A GPU for every worker, dealt in turn: `make test-gpu WORKERS=4` runs engines on two GPUs, two on each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def own_gpu(worker: str | None, visible: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for pytest-xdist's `worker` ("gw0", ...); None: leave it as it is."""
    if worker is None or count < 2:
        return None
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return names[int(worker.removeprefix("gw")) % len(names)]


# At import, before anything has touched CUDA in this process.
if (chosen := own_gpu(os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES"),
                      torch.cuda.device_count())) is not None:  # fmt: skip
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share a live engine stay in one process; engines of a file are dealt to all of them."""
    if item.path.parent == Path(__file__).parent:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("live")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {getattr(case, 'name', '')}".strip()))
