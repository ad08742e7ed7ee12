"""`lowbit report` and the end of every sweep: tables, figures and MLflow from the result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.records.arms import group_arms
from harness.records.packed import make_available
from harness.records.run_result import RunResult, read_results, write_atomic
from harness.sweep import SWEEPS, Sweep, read_sweep


def report(name: str, results: Path, *, only: str | None = None) -> int:
    """Tables and figures of a sweep that has results."""
    make_available(results, name)
    folder = results / "runs" / name
    known = sorted(p.name for p in (results / "runs").glob("*") if p.is_dir())
    if not folder.is_dir():
        raise ValueError(f"sweep {name!r} has no results in {results}; valid: {', '.join(known) or 'none yet'}")
    return present(_sweep_or_bare(name), results, False, only=only)


def main_table(name: str, results: Path) -> int:
    """The table of a README: printed, and written beside the others."""
    from harness.report import main_table as made

    make_available(results, name)
    sweep, found = _sweep_or_bare(name), read_results(results / "runs" / name)
    text, path = made.main_table(found, sweep.control), results / "tables" / f"{name}_main.md"
    write_atomic(path, text.encode())
    print(f"{text}\nwritten: {path}")
    return 0


def _sweep_or_bare(name: str) -> Sweep:
    if (SWEEPS / f"{name}.yaml").is_file():
        return read_sweep(name)
    return Sweep(name=name, question="", arms=({},), seeds=(0,))


def present(sweep: Sweep, results: Path, is_tracked: bool, only: str | None = None) -> int:
    """Tables, figures, MLflow, and the verdict table on the terminal."""
    from harness.report import tables

    found = read_results(results / "runs" / sweep.name)
    written: list[Path] = []
    if only != "figures":
        written += tables.write_tables(found, results / "tables", sweep.name, control=sweep.control)
    if only != "tables":
        from harness.published.figures.grid import draw_grid
        from harness.report.figures import draw_all

        written += draw_all(results, results / "figures" / sweep.name, sweep.name, overview=draw_grid)
        written += _profiles(found, sweep, results)
    written += _break_even(found, sweep, results, only)
    if is_tracked:
        from harness.viewers.mlflow import track

        track(results, sweep.name)
    if only != "figures":
        print(tables.render_terminal(tables.leaderboard(found, control=sweep.control)))
    print("written: " + ", ".join(str(path) for path in written))
    return 0


def _break_even(found: Sequence[RunResult], sweep: Sweep, results: Path, only: str | None) -> list[Path]:
    """Table and figure of where a precision pays; nothing for a sweep with one size and one length."""
    from harness.studies import break_even

    tables = None if only == "figures" else results / "tables"
    figures = None if only == "tables" else results / "figures" / sweep.name
    return break_even.write(found, tables, figures, sweep.name, sweep.control)


def _profiles(found: Sequence[RunResult], sweep: Sweep, results: Path) -> list[Path]:
    """The figure of whole distributions of runs."""
    from harness.report.plots.profiles import profile_figure, save_png

    arms = group_arms(found)
    return save_png(lambda: profile_figure(arms, sweep.control), results / "figures" / sweep.name / "profiles.png")
