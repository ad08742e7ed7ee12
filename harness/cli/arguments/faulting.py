"""`lowbit faults`: faults on purpose, and an audit of what they left."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from harness.cli.arguments.kinds import Commands, command, places, positive, word_list


def add(commands: Commands) -> None:
    """Faults on purpose."""
    faults = command(
        commands, "faults", "inject faults into sweeps of tiny real cells; exit 1 where a result is wrong", _faults
    )
    faults.add_argument("--count", type=positive, default=200, help="faults to inject, at least (default: 200)")
    faults.add_argument("--seed", type=int, default=0, help="of the schedule (default: 0)")
    faults.add_argument("--kinds", type=word_list, help="comma-separated kinds of faults (default: all)")
    faults.add_argument("--workers", type=positive, default=os.cpu_count(), help="cells at a time (default: cores)")
    faults.add_argument(
        "--scratch", type=Path, help="new folder for the sweeps, which is kept (default: a temporary one)"
    )
    places(faults)


def _faults(a: argparse.Namespace) -> int:
    from harness.cli.commands.faulting import faults

    return faults(a.count, a.seed, kinds=a.kinds, workers=a.workers, scratch=a.scratch, results=a.results)
