"""`lowbit figures`: the figures of papers drawn from our results, and of sweeps."""

from __future__ import annotations

import argparse

from harness.cli.arguments.kinds import Commands, command, places


def add(commands: Commands) -> None:
    """The command that draws."""
    words = "draw paper figures (all, or those named) and the figures of named sweeps from their results"
    figures = command(commands, "figures", words, _figures)
    figures.add_argument(
        "names", nargs="*", metavar="NAME", help="paper figures or sweeps (default: all paper figures)"
    )
    figures.add_argument("--list", action="store_true", dest="is_listing", help="name the paper figures")
    figures.add_argument("--notebooks", action="store_true", dest="is_executing",
                         help="execute notebooks/*.py into their .ipynb as well (extra: notebooks)")  # fmt: skip
    places(figures)


def _figures(a: argparse.Namespace) -> int:
    from harness.cli.commands.figuring import figures, listing

    return listing(a.results) if a.is_listing else figures(a.names, a.results, is_executing=a.is_executing)
