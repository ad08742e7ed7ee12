"""`lowbit search`: run a search with progress, show what it found, open its dashboard."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.options import (
    add_results,
    add_tracking,
    add_workers,
    check_beside,
    check_trackers,
    hours,
    port,
    positive,
    tell_written,
)

if TYPE_CHECKING:
    from harness.studies.search.run import Progressed, Session
    from harness.studies.search.spec import Budget, Search


PORT = 8080


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", help="a file sweeps/search_*.yaml without its ending, or a path to one")
    parser.add_argument("--trials", type=positive, help="end after so many trials in all (default: the file's budget)")
    add_workers(parser, "cells")
    parser.add_argument("--max-hours", type=hours, metavar="H", help="stop after so long; the same command goes on")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--dry-run", action="store_true", help="show space, budget and expected time, run nothing")
    way.add_argument("--report", action="store_true", help="write table and figures of what is there, run nothing")
    way.add_argument("--restart", action="store_true", help="begin a new study; the old one is kept aside")
    way.add_argument("--dashboard", action="store_true", help="open optuna-dashboard on the study, run nothing")
    parser.add_argument("--port", type=port, default=PORT, help=f"port of the dashboard (default: {PORT})")
    add_tracking(parser)
    add_results(parser, reads=lambda a: a.report or a.dashboard, check=_check)


def _check(a: argparse.Namespace) -> None:
    _check_options(a)
    search = _read(a)
    if a.report or a.dashboard:
        _check_study(search, a.results)
    check_trackers(a.trackers)


def _check_options(a: argparse.Namespace) -> None:
    """Raises ValueError for an option that would have no effect."""
    if a.report or a.dashboard:
        check_beside(a, f"--{'report' if a.report else 'dashboard'}, which runs nothing", trials=None, max_hours=None)
    if not a.dashboard:
        check_beside(a, "a call without --dashboard", port=PORT)


def _read(a: argparse.Namespace) -> Search:
    """The search of a call, with its budget."""
    from harness.studies.search.space import check_space
    from harness.studies.search.spec import read_search

    found = read_search(a.name)
    check_space(found)
    return found if a.trials is None else replace(found, budget=replace(found.budget, trials=a.trials))


def run(a: argparse.Namespace) -> int:
    """Search, or serve the dashboard, write the report, show the dry run."""
    from harness.studies.search.spec import read_search

    _check_options(a)
    if a.dashboard:
        return dashboard(read_search(a.name), a.results, a.port)
    if a.report:
        return report(read_search(a.name), a.results)
    if a.dry_run:
        return dry_run(_read(a), a.results, a.workers)
    check_trackers(a.trackers)
    return search(_read(a), a)


class Progress:
    """A bar over the trials of a budget on a terminal; a line per trial, and per run on fresh seeds, everywhere."""

    def __init__(self, search: Search) -> None:
        from tqdm import tqdm

        self.budget, self.metrics = search.budget, [objective.metric for objective in search.objectives]
        self.bar = tqdm(total=self.budget.trials, unit="trial", disable=not sys.stderr.isatty())
        self.started = time.perf_counter()

    def __call__(self, event: Progressed) -> None:
        self.bar.n = event.usage.trials
        self.bar.refresh()
        self._tell(f"{event.usage.trials}/{self.budget.trials or '-'}", trial_line(event, self.metrics))

    def confirming(self, session: Session, pool: ThreadPoolExecutor) -> list[Future[Any]]:
        """Submit the runs of `confirm`, with a line when each is done."""
        from harness.studies.search.confirm import submit

        futures, done = submit(session, pool), count(1)

        def tell(future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                result = future.result().result
                self._tell(f"fresh seeds {next(done)}/{len(futures)}", f"{result.status} {result.name}")

        for future in futures:
            future.add_done_callback(tell)
        return futures

    def _tell(self, done: str, line: str) -> None:
        minutes = (time.perf_counter() - self.started) / 60
        self.bar.write(f"[{done}] {minutes:5.1f} min  {line}", file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """End the bar."""
        self.bar.close()


def trial_line(event: Progressed, metrics: Sequence[str]) -> str:
    """One trial: its end, its knobs, its values by metric."""
    from harness.studies.search.space import text

    label = f"{event.share} {event.number}".strip()
    knobs = " ".join(f"{name}={text(value)}" for name, value in event.values.items())
    if event.objectives is None:
        return f"{event.outcome.state} {label}: {knobs}: {event.outcome.reason}"
    return f"{event.outcome.state} {label}: {knobs}: " + ", ".join(
        f"{metric} {value:.4g}" for metric, value in zip(metrics, event.objectives, strict=True)
    )


def search(found: Search, a: argparse.Namespace) -> int:
    """Search until the budget is spent, confirm the best, then table, figures and trackers. 130 where interrupted."""
    from harness.records.packed import make_available
    from harness.studies.search.run import run_search
    from harness.studies.search.store import put_aside

    make_available(a.results, found.name)
    if a.restart and (kept := put_aside(a.results, found.name)) is not None:
        print(f"{found.name}: the old study is {kept}")
    print(f"{found.name}: {found.question}")
    progress = Progress(found)
    try:
        is_interrupted = run_search(
            found, a.results, a.workers, progress, max_hours=a.max_hours, afterwards=progress.confirming
        )
    finally:
        progress.close()
    if is_interrupted:
        print(f"\nstopped; the same command {'without --restart ' if a.restart else ''}goes on from here")
        return 130
    return _present(found, a.results, a.trackers)


def report(found: Search, results: Path) -> int:
    """Table and figures from the stored study."""
    from harness.records.packed import make_available

    _check_study(found, results)
    make_available(results, found.name)
    return _present(found, results, ())


def _check_study(search: Search, results: Path) -> None:
    """Raises ValueError where the search has not run."""
    from harness.records.paths import journal_path

    if not journal_path(results, search.name).exists():
        raise ValueError(f"search {search.name!r} has no study in {results}; run it first: lowbit search {search.name}")


def _present(search: Search, results: Path, trackers: tuple[str, ...]) -> int:
    from harness.studies.search.figures import draw_search
    from harness.studies.search.table import write_tables

    written = write_tables(search, results)
    written += draw_search(search, results)
    if trackers:
        from harness.viewers.trackers import track

        track(results, search.name, trackers)
    print(written[0].read_text(encoding="utf-8").split("\n\n")[1])
    tell_written(written)
    return 0


def dry_run(found: Search, results: Path, workers: int) -> int:
    """Space, budget, what is there, and a guess of the time."""
    from harness.studies.search.run import has_room, total, usage

    print(f"{found.name}: {found.question}")
    for knob, entry in found.space.items():
        span = f"{entry.low} to {entry.high}{' (log)' * entry.log}"
        what = span if entry.choices is None else ", ".join(map(str, entry.choices))
        when = "".join(f", where {key} is {' or '.join(map(str, values))}" for key, values in entry.when.items())
        print(f"  {knob}: {what}{when}")
    there = _there(found, results)
    size = len(found.seeds)
    spent = total([usage(found_trials, size) for found_trials in there.values()])
    print(f"  seeds {list(found.seeds)}; {spent.trials} trials and {spent.cells} cells are done, {spent.failed} failed")
    print(f"  budget: {_budget(found.budget)}")
    is_spent = not has_room(found.budget, spent, size)
    if found.budget.trials is not None:
        cells = max(0, found.budget.trials - spent.trials) * size + _fresh(found, results, there, is_spent)
        print(f"  at most {cells} cells")
        for line in _forecast(found, results, cells, workers) if cells else ():
            print(f"  {line}")
    if is_spent:
        print("  the budget is spent")
    return 0


def _fresh(search: Search, results: Path, there: Mapping[str, Any], is_spent: bool) -> int:
    """Cells that the confirmation lacks, at most: until the budget is spent another trial may become the best."""
    from harness.config.schema import Launch
    from harness.studies.search.confirm import confirmed, contenders

    known = contenders(search, there)
    count = len(known) if is_spent else len(search.baselines) + len(search.shares) + len(search.references)
    settled = [one for one in known if is_spent or one.kind != "best"]
    done = confirmed(search, settled, Launch(results=str(results), sweep=search.name))
    return count * len(search.confirm.seeds) - sum(map(len, done.values()))


def _forecast(search: Search, results: Path, cells: int, workers: int) -> list[str]:
    """Lines on the time that so many cells take, as a sweep's dry run has them: cells of the baselines in turn, else
    of the lower end of the space."""
    from harness.studies.search.space import cell_of, combinations, overrides_of
    from harness.sweep.forecast import fit, read_samples
    from harness.sweep.preview import forecast_lines

    model = fit(read_samples(results))
    samples = list(search.baselines.values()) or [next(combinations(search.space))]
    found = [cell_of(overrides_of(search, values), search.seeds[0]) for values in samples]
    todo = [cell for cell, _ in zip(cycle(found), range(cells), strict=False)]
    return forecast_lines(todo, [model.estimate(cell) for cell in todo], model, workers)


def _budget(budget: Budget) -> str:
    limits = {"trials": budget.trials, "cells": budget.cells, "core-seconds": budget.core_seconds}
    said = ", ".join(f"{value:g} {unit}" for unit, value in limits.items() if value is not None)
    return said + (f", in equal shares per {budget.per}" if budget.per else "")


def _there(search: Search, results: Path) -> Mapping[str, Any]:
    """Share -> trials of the study, where there is one."""
    from harness.records.paths import journal_path
    from harness.studies.search.store import open_studies

    if not journal_path(results, search.name).exists():
        return {}
    return {s: study.get_trials() for s, study in open_studies(search, results, is_writing=False).items()}


def dashboard(found: Search, results: Path, port: int) -> int:
    """Serve optuna-dashboard on this machine until interrupted. Raises ValueError where the port is taken."""
    from harness.foundation.local_port import check_port
    from harness.records.paths import journal_path
    from harness.studies.search.store import storage_of

    _check_study(found, results)
    check_port(port)
    from optuna_dashboard import run_server

    print(f"{journal_path(results, found.name)}: http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    try:
        run_server(storage_of(results, found.name), host="127.0.0.1", port=port)
    except KeyboardInterrupt:
        return 0
    return 0
