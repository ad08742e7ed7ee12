"""`lowbit report` and the end of every sweep: tables, figures and trackers from the result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.options import add_results, always, tell_written
from harness.records.paths import figures_folder, journal_path, runs_folder, tables_folder

if TYPE_CHECKING:
    from harness.records.run_result import RunResult
    from harness.sweep import Sweep


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "name", nargs="?", help="a sweep with results, or the YAML file of one (with --html alone: every one)"
    )
    parser.add_argument("--only", choices=("tables", "figures"), help="write the tables alone, or the figures alone")
    parser.add_argument("--main", dest="is_main", action="store_true",
                        help="the main table of a README instead: settings side by side, with verdicts")  # fmt: skip
    parser.add_argument("--html", dest="is_html", action="store_true", help="write the site of all results too")
    add_results(parser, reads=always, check=_check)


def _check(a: argparse.Namespace) -> None:
    _check_options(a)
    if a.name is not None:
        _check_results(_sweep_of(a.name, a.results).name, a.results)


def _check_options(a: argparse.Namespace) -> None:
    if a.name is None and (a.is_main or not a.is_html):
        raise ValueError("report: the name of a sweep is missing; only --html does without")
    if a.only is not None and (a.name is None or a.is_main):
        raise ValueError(f"only={a.only}: goes with the name of a sweep and without --main, which writes one table")


def run(a: argparse.Namespace) -> int:
    """Write what is asked for. Raises ValueError where the sweep is missing."""
    _check_options(a)
    code, name = 0, a.name
    if name is not None:
        code = main_table(name, a.results) if a.is_main else report(name, a.results, only=a.only)
    if a.is_html:
        from harness.cli.site import site

        code = site(a.results, ()) or code
    return code


def report(name: str, results: Path, *, only: str | None = None) -> int:
    """Tables and figures of a sweep that has results."""
    sweep = _available(name, results)
    return present(sweep, results, (), only=only)


def main_table(name: str, results: Path) -> int:
    """The table of a README: printed, and written beside the others."""
    from harness.foundation.whole_file import write_atomic
    from harness.records.looks import level_of
    from harness.records.run_result import read_results
    from harness.report import main_table as made

    sweep = _available(name, results)
    found, level = read_results(runs_folder(results, sweep.name)), level_of(results, sweep.name)
    text = made.main_table(found, sweep.control, sweep.baselines[-1], sweep.endpoints, level)
    path = tables_folder(results) / f"{sweep.name}_main.md"
    write_atomic(path, text.encode())
    print(f"{text}\nwritten: {path}")
    return 0


def _available(name: str, results: Path) -> Sweep:
    """The sweep, unpacked where it is packed. Raises ValueError as `_check_results`."""
    from harness.records.packed import make_available

    sweep = _sweep_of(name, results)
    _check_results(sweep.name, results)
    make_available(results, sweep.name)
    return sweep


def _check_results(name: str, results: Path) -> None:
    """Raises ValueError where the sweep has no results, and for a search, whose table has the same name."""
    from harness.records.folder import check_sweep

    if journal_path(results, name).exists():
        raise ValueError(f"{name} is a search, whose table is another: lowbit search {name} (or its file) --report")
    check_sweep(results, name)


def _sweep_of(name: str, results: Path) -> Sweep:
    """The sweep of a name or of a file; of a paper's recipe, of results that keep their purpose, and of a name without
    a file what a report needs of one."""
    from harness.records.paths import purpose_path
    from harness.records.sweep_file import purpose
    from harness.sweep import SWEEPS, Sweep, read_sweep

    is_named = (SWEEPS / f"{name}.yaml").is_file() and not purpose_path(results, name).is_file()
    if name.endswith((".yaml", ".yml")) or is_named:
        return read_sweep(name)
    return Sweep(name=name, arms=({},), seeds=(0,), **vars(purpose(name, results)))


def present(sweep: Sweep, results: Path, trackers: tuple[str, ...], only: str | None = None) -> int:
    """Tables, figures, trackers, and the verdict table on the terminal."""
    from harness.records.looks import level_of
    from harness.records.run_result import read_results
    from harness.report import tables
    from harness.report.leaderboard import board_of

    runs = runs_folder(results, sweep.name)
    found = read_results(runs)
    if not found:
        raise ValueError(f"sweep {sweep.name!r} has no results in {results}")
    board = board_of(found, sweep.control, sweep.endpoints, level_of(results, sweep.name), sweep.baselines)
    written: list[Path] = []
    if only != "figures":
        written += tables.write_tables(board, tables_folder(results), sweep.name, sweep.expectations)
    if only != "tables":
        from harness.published.figures.grid import draw_grid
        from harness.report.figures import draw_all

        missing = [run.run_id for run in found if run.num_steps and not (runs / f"{run.run_id}.parquet").exists()]
        if missing:
            print(f"warning: {runs}: no series of {', '.join(missing)}: curves leave them out", file=sys.stderr)
        written += draw_all(board, runs, figures_folder(results, sweep.name), overview=draw_grid)
    written += _break_even(found, sweep, results, only)
    if trackers:
        from harness.viewers.trackers import track

        track(results, sweep.name, trackers)
    if only != "figures":
        print(tables.render_terminal(board.table, board.baselines[-1]))
        if against := tables.render_against(board):
            print(f"\n{against}")
    tell_written(written)
    return 0


def _break_even(found: Sequence[RunResult], sweep: Sweep, results: Path, only: str | None) -> list[Path]:
    """Table and figure of where a precision pays; nothing for a sweep with one size and one length."""
    from harness.studies.break_even.report import write

    tables = None if only == "figures" else tables_folder(results)
    figures = None if only == "tables" else figures_folder(results, sweep.name)
    return write(found, tables, figures, sweep.name, sweep.control)
