"""Causes of a cell's end, in the words of its record.

The first word decides what a sweep does about it: `lost` and `hung` are accidents of the machine, `MemoryError` asks
for less memory, everything else is a defect that would come again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from harness.run.cell import CANCELLED, UNWRITTEN

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a process brings on itself."""
OUT_OF_MEMORY = "MemoryError: killed by the kernel's out-of-memory killer"
REQUESTED = "stopped on request; run the sweep again to go on"


def ending(code: int, log: str, *, is_oom: bool) -> tuple[str, str]:
    """(status, reason) of a process that ended with this exit code (minus the signal) and left no record.

    `log` is what it printed; `is_oom` says that the kernel ended a process for want of memory while this one ran.
    """
    if code == CANCELLED:
        return "cancelled", REQUESTED
    lines = log.strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    if code == 0:
        return "failed", "the process ended well and left no record"
    if code == UNWRITTEN:
        return "failed", f"the record could not be written{last}"
    if code > 0:
        return "failed", f"the process ended with exit code {code}{last}"
    if -code == signal.SIGKILL and is_oom:
        return "failed", OUT_OF_MEMORY
    kind = "crashed" if -code in CRASHES else "lost"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return "failed", f"{kind}: killed by {name}"


def _counters() -> Iterator[Path]:
    """Files that count the processes which the kernel ended for want of memory, the most specific first."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, group = line.split(":", 2)
        inside = group.lstrip("/")
        if controllers == "":
            yield root / inside / "memory.events"
        elif controllers == "memory":
            yield root / "memory" / inside / "memory.oom_control"
    yield root / "memory.events"  # a container that does not see its own path
    yield root / "memory" / "memory.oom_control"
    yield Path("/proc/vmstat")


def oom_kills() -> int:
    """Number of processes of our control group (of the machine, where no group can be read) that the kernel's
    out-of-memory killer has ended so far; 0 where the system does not tell."""
    try:
        for path in _counters():
            lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
            for words in map(str.split, lines):
                if words[0] == "oom_kill":
                    return int(words[1])
    except OSError:
        return 0
    return 0
