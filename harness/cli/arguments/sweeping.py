"""`lowbit sweep | run | base | report`: commands that compute."""

from __future__ import annotations

import argparse
import os

from harness.cli.arguments.kinds import OVERRIDES, Commands, command, hours, minutes, places, positive


def add(commands: Commands) -> None:
    """Commands that compute."""
    sweep = command(commands, "sweep", "run a sweep; finished cells are skipped, so starting again resumes", _sweep)
    sweep.add_argument("name", help="a file of sweeps/ without its ending, or a path to a YAML file")
    sweep.add_argument("overrides", nargs="*", help=f"{OVERRIDES}; they apply to every cell and come last")
    sweep.add_argument("--dry-run", action="store_true",
                       help="list cells, what is left out, predicted time and its error; run nothing")  # fmt: skip
    sweep.add_argument("--workers", type=positive, default=os.cpu_count(), help="cells at a time (default: cores)")
    sweep.add_argument("--seeds", type=_seeds, help="comma-separated seeds in place of the file's")
    limit = sweep.add_mutually_exclusive_group()
    limit.add_argument("--max-hours", type=hours, metavar="H",
                       help="start no new cell that is not predicted to end within so many hours; what still runs "
                            "then saves its state")  # fmt: skip
    limit.add_argument("--minutes", type=minutes, dest="max_minutes", metavar="M", help="the same in minutes")
    sweep.add_argument("--launcher", choices=("local", "ray"), default="local",
                       help="processes of this machine, or tasks of a Ray cluster (default: local)")  # fmt: skip
    sweep.add_argument(
        "--ray-address", metavar="ADDRESS", help="of an existing Ray cluster (default: one started here)"
    )
    sweep.add_argument("--no-tracking", action="store_true", help="do not log to MLflow")
    places(sweep)

    run = command(commands, "run", "run one cell", _run)
    run.add_argument("overrides", nargs="*", help=OVERRIDES)
    run.add_argument("--dry-run", action="store_true", help="print the resolved configuration, run nothing")
    places(run)

    base = command(commands, "base", "train the base models that sweeps start from, where they are missing", _base)
    base.add_argument("sweeps", nargs="*", default=[], metavar="sweep | key=value",
                      help=f"sweeps whose bases to train (default: all); {OVERRIDES}")  # fmt: skip
    base.add_argument("--workers", type=positive, default=os.cpu_count(), help="bases at a time (default: cores)")
    base.add_argument("--minutes", type=minutes, metavar="M",
                      help="stop after so long and save what was reached; the same command goes on")  # fmt: skip
    places(base)

    report = command(commands, "report", "write tables and figures of a sweep from its results", _report)
    report.add_argument("name", nargs="?", help="a sweep with results (with --html alone: every one)")
    report.add_argument("--only", choices=("tables", "figures"), help="write one of the two")
    report.add_argument("--main", dest="is_main", action="store_true",
                        help="the main table of a README alone: settings side by side, with verdicts")  # fmt: skip
    report.add_argument("--html", dest="is_html", action="store_true", help="write the site of all results too")
    places(report)


def _sweep(a: argparse.Namespace) -> int:
    from harness.cli.commands.sweeping import Way, sweep

    way = Way(
        workers=a.workers, launcher=a.launcher, ray_address=a.ray_address,
        max_hours=a.max_hours if a.max_minutes is None else a.max_minutes / 60,
        is_tracked=not a.no_tracking,
    )  # fmt: skip
    return sweep(a.name, a.overrides, results=a.results, way=way, seeds=a.seeds, is_dry=a.dry_run)


def _run(a: argparse.Namespace) -> int:
    from harness.cli.commands.sweeping import run

    return run(a.overrides, results=a.results, is_dry=a.dry_run)


def _base(a: argparse.Namespace) -> int:
    from harness.cli.commands.bases import base

    names = [word for word in a.sweeps if "=" not in word]
    overrides = [word for word in a.sweeps if "=" in word]
    return base(names, overrides, results=a.results, workers=a.workers, minutes=a.minutes)


def _report(a: argparse.Namespace) -> int:
    from harness.cli.commands.reporting import main_table, report

    if a.name is None and not a.is_html:
        raise ValueError("report: the name of a sweep is missing; only --html does without")
    if a.is_main:
        if a.name is None:
            raise ValueError("report --main: the name of a sweep is missing")
        return main_table(a.name, a.results)
    code = report(a.name, a.results, only=a.only) if a.name is not None else 0
    if a.is_html:
        from harness.cli.commands.inspecting import site

        code = site(a.results, ()) or code
    return code


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers separated by commas are expected") from None
