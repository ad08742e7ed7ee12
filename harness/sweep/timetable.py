"""Timetable of a sweep's cells on the cores and GPUs of one machine, by the rule of the local launcher.

Cells start in order. One has to wait while as many run as there are workers, and while no GPU has room for it: engines
of vLLM share a GPU as far as their parts of its memory go, other engines without limit, and a cell whose time is that
of a whole GPU has it to itself. Left out: cells that end early, and retries.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from harness.sweep.launchers.local import gpus_for


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Demand of one cell."""

    seconds: float
    gpus: int = 0
    """0: it computes on a core."""
    share: float = 0.0
    """Part of the memory of each of them."""


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Outcome for a whole sweep."""

    wall_s: float
    """Seconds until the last cell ends."""
    gpu_s: float
    """Seconds in which a GPU has a cell, added up over the GPUs: what shared ones cost is counted once."""
    at_once: int
    """Most cells that run at a time."""
    gpus: int
    """GPUs that have a cell at some time."""


def timetable(demands: Sequence[Demand], workers: int, num_gpus: int) -> Timetable:
    """The timetable of cells with so many workers and GPUs; no cell asks for more GPUs than there are."""
    names = [str(i) for i in range(num_gpus)]
    running: list[tuple[float, int, list[str], float]] = []  # (end, number, GPUs, share), the next to end first
    used_until = dict.fromkeys(names, 0.0)
    start = wall_s = gpu_s = 0.0
    at_once = 0

    def room(cell: Demand) -> list[str]:
        return gpus_for(cell.gpus, cell.share, [(own, share) for _, _, own, share in running], names)

    for number, cell in enumerate(demands):
        while len(running) == workers or (cell.gpus and not room(cell)):
            start = running[0][0]
            while running and running[0][0] <= start:
                heapq.heappop(running)
        own, end = room(cell) if cell.gpus else [], start + cell.seconds
        for gpu in own:
            gpu_s += max(0.0, end - max(start, used_until[gpu]))
            used_until[gpu] = max(end, used_until[gpu])
        heapq.heappush(running, (end, number, own, cell.share))
        at_once, wall_s = max(at_once, len(running)), max(wall_s, end)
    return Timetable(wall_s=wall_s, gpu_s=gpu_s, at_once=at_once, gpus=sum(end > 0 for end in used_until.values()))
