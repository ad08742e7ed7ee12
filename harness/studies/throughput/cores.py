"""Cores of the host: a process that measures gets most of its lane's, the one that imports meanwhile the others.

Left out: memory nodes, and hosts with fewer than 8 cores, where nothing is pinned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LEAST = 8
"""Visible cores from which processes are pinned."""
SPARE = 4
"""One core in so many of a lane is its importing process's."""
TOPOLOGY = Path("/sys/devices/system/cpu")
Share = tuple[list[int], list[int]]
"""(cores of the measuring process, cores of the importing one)."""


def visible(topology: Path = TOPOLOGY) -> list[int]:
    """The cores that this process may use, threads of one core next to each other; none where that cannot be said."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return []
    return sorted(os.sched_getaffinity(0), key=lambda core: (_first_sibling(core, topology), core))


def _first_sibling(core: int, topology: Path) -> int:
    try:
        words = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return core
    return int(words.replace("-", ",").partition(",")[0])


def shares(cores: Sequence[int], lanes: int) -> list[Share] | None:
    """The cores split among so many lanes, and within each; None where they are too few to pin."""
    if len(cores) < LEAST or len(cores) < 2 * lanes:
        return None
    size = len(cores) // lanes
    found: list[Share] = []
    for lane in range(lanes):
        own = list(cores[lane * size : (lane + 1) * size])
        kept = max(1, size // SPARE)
        found.append((own[:-kept], own[-kept:]))
    return found


def pin(process: int, cores: Sequence[int]) -> None:
    """Every thread of a process to these cores; those it starts later inherit them."""
    for thread in _threads(process):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)


def _threads(process: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{process}/task").iterdir()]
    except FileNotFoundError:
        return []
