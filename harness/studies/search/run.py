"""The queue of a search: workers ask for trials until the budget is spent, however many processes share the study.

A worker is a thread that mostly waits for the process of its cell. Trials are taken under the study's lock, so that two
workers never have the same one and shares of the budget stay equal. Ctrl-C lets running cells save their state and
leaves their trials to the next start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from harness.config.schema import Launch
from harness.foundation.lock_file import held
from harness.foundation.provenance import commit
from harness.records.results_lock import results_lock
from harness.studies.search.cells import Runner, Stopped, local_runner
from harness.studies.search.space import suggest
from harness.studies.search.spec import Budget, Search
from harness.studies.search.store import lock_folder, open_studies, present, take_back
from harness.studies.search.trials import Surroundings, TrialOutcome, aggregate, evaluate, has_failed, violation

WAIT_S = 1.0
"""Between two looks of a worker that has nothing to do while trials run elsewhere."""
MAX_FAILED = 8
"""Trials that may fail by themselves before a search gives up: the reason is then in the space or in the code."""


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """A trial ended."""

    share: str
    number: int
    values: dict[str, Any]
    """Its knobs."""
    outcome: TrialOutcome
    objectives: tuple[float, ...] | None
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Budget that a study has spent, and what its running trials may still spend."""

    trials: int
    cells: int
    seconds: float
    running: int
    failed: int
    """By themselves; those whose worker died do not count."""
    ahead_cells: int
    ahead_s: float


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process that works on a search."""

    around: Surroundings
    results: Path
    studies: dict[str, optuna.Study]
    worker: str
    on_event: Callable[[Progressed], None]

    @property
    def search(self) -> Search:
        """The search."""
        return self.around.search


def usage(trials: Sequence[FrozenTrial], num_seeds: int) -> Usage:
    """Budget that some trials have spent."""
    ended = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    costs = [float(t.user_attrs.get("cost_s", 0.0)) for t in ended]
    running = sum(t.state == TrialState.RUNNING for t in trials)
    return Usage(
        trials=len(ended),
        cells=sum(len(t.user_attrs.get("cells", {})) for t in ended),
        seconds=sum(costs),
        running=running,
        failed=sum(map(has_failed, trials)),
        ahead_cells=running * num_seeds,
        ahead_s=running * (fmean(costs) if costs else 0.0),
    )


def total(parts: Sequence[Usage]) -> Usage:
    """Budget that all shares together have spent."""
    names = ("trials", "cells", "seconds", "running", "failed", "ahead_cells", "ahead_s")
    return Usage(**{name: sum(getattr(part, name) for part in parts) for name in names})


def has_room(budget: Budget, spent: Usage, num_seeds: int) -> bool:
    """May another trial start?"""
    return (
        (budget.trials is None or spent.trials + spent.running < budget.trials)
        and (budget.cells is None or spent.cells + spent.ahead_cells + num_seeds <= budget.cells)
        and (budget.core_seconds is None or spent.seconds + spent.ahead_s < budget.core_seconds)
    )


def charge(budget: Budget, spent: Usage) -> float:
    """Unit in which shares are kept equal: core-seconds, else cells, else trials."""
    if budget.core_seconds is not None:
        return spent.seconds + spent.ahead_s
    return spent.cells + spent.ahead_cells if budget.cells is not None else spent.trials + spent.running


def claim(session: Session) -> tuple[str, Trial, dict[str, Any]] | Literal["wait", "done"]:
    """(share, trial, its knobs) for this worker; "wait" while others' trials may leave budget, "done" where none is
    left.

    Raises ValueError where too many trials failed.
    """
    search, budget = session.search, session.search.budget
    with held(lock_folder(session.results, search.name) / "study.lock"):
        for study in session.studies.values():
            take_back(study, study.get_trials(deepcopy=False), session.results, search.name)
        trials = {share: study.get_trials(deepcopy=False) for share, study in session.studies.items()}
        spent = {share: usage(found, len(search.seeds)) for share, found in trials.items()}
        whole = total(list(spent.values()))
        if whole.failed > MAX_FAILED:
            reason = next(t.user_attrs["reason"] for found in trials.values() for t in found if has_failed(t))
            raise ValueError(f"{search.name}: {whole.failed} trials failed, the first because of: {reason}")
        if not has_room(budget, whole, len(search.seeds)):
            return "wait" if whole.running else "done"
        waiting = [s for s, found in trials.items() if any(t.state == TrialState.WAITING for t in found)]
        share = min(waiting or list(spent), key=lambda s: charge(budget, spent[s]))
        trial = session.studies[share].ask()
        trial.set_user_attr("worker", session.worker)
        fixed = {budget.per: _choice(search, share)} if budget.per else {}
        return share, trial, suggest(trial, search.space, fixed)


def _choice(search: Search, share: str) -> Any:
    """The choice, in its own type, that a share is named for."""
    assert search.budget.per is not None
    return next(choice for choice in search.space[search.budget.per].choices or () if str(choice) == share)


def work(session: Session) -> None:
    """One worker: trials until none is left. Returns early when asked to stop."""
    while not session.around.stop.is_set():
        claimed = claim(session)
        if claimed == "done":
            return
        if claimed == "wait":
            session.around.stop.wait(WAIT_S)
            continue
        share, trial, values = claimed
        study = session.studies[share]
        try:
            outcome = evaluate(session.around, values, lambda study=study: study.get_trials(deepcopy=False))
        except Stopped:
            return
        tell(session, share, trial, values, outcome)


def tell(session: Session, share: str, trial: Trial, values: Mapping[str, Any], outcome: TrialOutcome) -> None:
    """Store what became of a trial: attributes first, so that a trial with an end always has them."""
    search, study = session.search, session.studies[share]
    found = {"values": dict(values), "cells": outcome.cells, "scores": outcome.scores, "cost_s": outcome.cost_s}
    for name, value in found.items():
        trial.set_user_attr(name, {str(k): v for k, v in value.items()} if isinstance(value, dict) else value)
    if outcome.reason:
        trial.set_user_attr("reason", outcome.reason)
    excess = violation(outcome.scores, search)
    if excess is not None and search.constraint is not None:
        trial.set_constraint(search.constraint.metric, excess)
    told = None
    if outcome.state == "complete":
        told = tuple(aggregate(outcome.scores, objective) for objective in search.objectives)
        study.tell(trial, list(told))
    else:
        study.tell(trial, state=TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL)
    spent = [usage(s.get_trials(deepcopy=False), len(search.seeds)) for s in session.studies.values()]
    session.on_event(
        Progressed(
            share=share, number=trial.number, values=dict(values), outcome=outcome, objectives=told, usage=total(spent)
        )
    )


@contextmanager
def alarm(hours: float | None, stop: threading.Event) -> Iterator[None]:
    """Ask for a stop after so many hours."""
    timer = threading.Timer(threading.TIMEOUT_MAX if hours is None else hours * 3600, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_search(
    search: Search,
    results: Path,
    workers: int,
    on_event: Callable[[Progressed], None],
    runner: Runner = local_runner,
    max_hours: float | None = None,
    afterwards: Callable[[Session, ThreadPoolExecutor], Sequence[Future[Any]]] | None = None,
) -> bool:
    """Work on a search until its budget is spent, then on what `afterwards` submits. Returns whether it was cut short:
    by Ctrl-C, or by `max_hours`.

    Raises ValueError for another search's study, a busy results folder, or too many failed trials.
    """
    sha, is_dirty = commit()
    launch = Launch(results=str(results), sweep=search.name, commit=sha, is_dirty=is_dirty)
    stop = threading.Event()
    with alarm(max_hours, stop), results_lock(results, is_shared=True), present(results, search.name) as worker:
        session = Session(
            around=Surroundings(search=search, launch=launch, runner=runner, stop=stop), results=results,
            studies=open_studies(search, results), worker=worker, on_event=on_event,
        )  # fmt: skip
        with ThreadPoolExecutor(workers) as pool:
            interrupted = finish([pool.submit(work, session) for _ in range(workers)], stop)
            if not interrupted and afterwards is not None:
                interrupted = finish(afterwards(session, pool), stop)
    return interrupted


def finish(futures: Sequence[Future[Any]], stop: threading.Event) -> bool:
    """Wait for threads; the first error, or Ctrl-C, asks the others to stop. Returns whether the work was cut short."""
    waiting = set(futures)
    while waiting:
        try:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                stop.set()
        except KeyboardInterrupt:
            stop.set()
    errors = [error for future in futures if (error := future.exception()) is not None]
    serious = [error for error in errors if not isinstance(error, Stopped)]
    if serious:
        raise serious[0]
    return stop.is_set()
