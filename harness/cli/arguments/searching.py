"""`lowbit search`: searches over knobs."""

from __future__ import annotations

import argparse
import os

from harness.cli.arguments.kinds import Commands, command, hours, places, positive


def add(commands: Commands) -> None:
    """The command of searches."""
    search = command(commands, "search", "search knobs with Optuna; starting again goes on", _search)
    search.add_argument("name", help="a file sweeps/search_*.yaml without its ending, or a path to one")
    search.add_argument("--trials", type=positive, help="end after so many trials in all (default: the file's budget)")
    search.add_argument("--workers", type=positive, default=os.cpu_count(), help="cells at a time (default: cores)")
    search.add_argument("--max-hours", type=hours, metavar="H", help="stop after so long; the same command goes on")
    search.add_argument("--dry-run", action="store_true", help="show space, budget and expected time, run nothing")
    search.add_argument("--report", action="store_true", help="write table and figures of what is there, run nothing")
    search.add_argument("--restart", action="store_true", help="begin a new study; the old one is kept aside")
    search.add_argument("--dashboard", action="store_true", help="open optuna-dashboard on the study, run nothing")
    search.add_argument("--port", type=positive, default=8080, help="of the dashboard (default: 8080)")
    search.add_argument("--no-tracking", action="store_true", help="do not log to MLflow")
    places(search)


def _search(a: argparse.Namespace) -> int:
    from harness.cli.commands.searching import dashboard, dry_run, report, search

    if a.dashboard:
        return dashboard(a.name, a.results, a.port)
    if a.dry_run:
        return dry_run(a.name, a.results, a.trials, a.workers)
    if a.report:
        return report(a.name, a.results)
    return search(
        a.name, results=a.results, trials=a.trials, workers=a.workers, max_hours=a.max_hours,
        is_restarted=a.restart, is_tracked=not a.no_tracking,
    )  # fmt: skip
