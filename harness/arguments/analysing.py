"""`lowbit early-warning | break-even`: analyses over several sweeps."""

from __future__ import annotations

import argparse

from harness.arguments.kinds import Commands, command, number_list, places


def add(commands: Commands) -> None:
    """Analyses over several sweeps."""
    words = "which signal moved first before runs collapsed, and by how many steps"
    early = command(commands, "early-warning", words, _early_warning)
    early.add_argument("sweeps", nargs="*", help="sweeps with results (default: standard corrections)")
    places(early)

    words = "from which size and length on a low precision pays for a whole step, from what was measured on the GPU"
    even = command(commands, "break-even", words, _break_even)
    even.add_argument("--batches", type=number_list, default=(64, 256), help="responses per step (default: 64,256)")
    places(even)


def _early_warning(a: argparse.Namespace) -> int:
    from harness.commands.analysing import early_warning

    return early_warning(a.sweeps, a.results)


def _break_even(a: argparse.Namespace) -> int:
    from harness.commands.analysing import break_even

    return break_even(a.results, a.batches)
