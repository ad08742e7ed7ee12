"""`lowbit early-warning`: which signal moved first before runs collapsed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.cli.options import add_results, add_write, always, tell_written

SWEEPS = ("standard", "corrections")
"""The sweeps with enough collapsed runs to learn from."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweeps", nargs="*", help=f"sweeps with results (default: {' '.join(SWEEPS)})")
    add_write(parser, "the table and the figures")
    add_results(parser, reads=always, check=_check)


def _check(a: argparse.Namespace) -> None:
    from harness.records.folder import check_sweep

    for name in a.sweeps:
        check_sweep(a.results, name)


def run(a: argparse.Namespace) -> int:
    """Analyse the sweeps."""
    return early_warning(a.sweeps, a.results, is_written=a.is_written)


def early_warning(sweeps: Sequence[str], results: Path, *, is_written: bool) -> int:
    """Signals against collapses over the named sweeps. Raises ValueError for a sweep without results."""
    from harness.records.folder import check_sweep
    from harness.records.packed import make_available
    from harness.records.paths import figures_folder, runs_folder, tables_folder
    from harness.records.run_result import read_results
    from harness.studies.early_warning.alarms import Trace, traces
    from harness.studies.early_warning.report import report, write

    runs: list[Trace] = []
    for name in sweeps or SWEEPS:
        check_sweep(results, name)
        make_available(results, name)
        folder = runs_folder(results, name)
        print(f"early-warning: reading {name}")
        runs += traces(folder, read_results(folder))
    page, scores = report(runs)
    print(page.partition("\n## ")[0].partition("\n\n")[2])
    if is_written:
        tell_written(write(runs, page, scores, tables_folder(results), figures_folder(results, "early_warning")))
    return 0
