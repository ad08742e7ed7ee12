"""`lowbit early-warning`: analyses over several sweeps."""

from __future__ import annotations

import argparse

from harness.arguments.kinds import Commands, command, places


def add(commands: Commands) -> None:
    """Analyses over several sweeps."""
    words = "which signal moved first before runs collapsed, and by how many steps"
    early = command(commands, "early-warning", words, _early_warning)
    early.add_argument("sweeps", nargs="*", help="sweeps with results (default: standard corrections)")
    places(early)


def _early_warning(a: argparse.Namespace) -> int:
    from harness.commands.analysing import early_warning

    return early_warning(a.sweeps, a.results)
