"""One cell of a trial: found if it has a record, run if not, given up where a rule says so; never run twice at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.records.run_result import RunResult, read_result, write_result
from harness.records.statuses import FINISHED
from harness.run.cell import record, record_path, work_folder
from harness.studies.search.store import lock_folder
from harness.sweep.launchers.job import Event, Job
from harness.sweep.launchers.local import run_cells

GIVEN_UP = "given up by the search: "
"""Beginning of the reason of a cancelled record that is an outcome and not an interruption."""
Runner = Callable[[Job], Generator[Event, None, None]]
Verdict = Callable[[dict[int, float]], str | None]
"""Rewards seen so far (step from 1 -> reward) -> why the cell is given up, or None."""


class Stopped(Exception):  # noqa: N818 - a request, not a defect
    """The search was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """Result of a cell for its trial."""

    result: RunResult
    rewards: dict[int, float]
    """Step -> its reward, as far as it ran here."""
    seconds: float
    """Seconds of one core."""


def local_runner(job: Job) -> Generator[Event, None, None]:
    """The cell as a process of this machine."""
    return run_cells([job], 1)


def outcome_on_disk(launch: Launch, config: RunConfig) -> RunResult | None:
    """The record of a cell that need not run again."""
    path = record_path(launch, run_id(config))
    result = read_result(path) if path.exists() else None
    if result is None or result.status in FINISHED:
        return result
    return result if result.status == "cancelled" and (result.reason or "").startswith(GIVEN_UP) else None


def run_one(
    config: RunConfig, launch: Launch, runner: Runner, stop: threading.Event, verdict: Verdict = lambda rewards: None
) -> CellOutcome:
    """The outcome of a cell, run where it has none. Raises Stopped, after the cell has saved its state."""
    lock = lock_folder(Path(launch.results), "cells") / f"{run_id(config)}.lock"
    with _claimed(lock, stop):
        found = outcome_on_disk(launch, config)
        if found is not None:
            return CellOutcome(result=found, rewards={}, seconds=found.time_s.get("total") or 0.0)
        started, rewards = time.monotonic(), dict[int, float]()
        events = runner(Job(config=config, launch=launch))
        try:
            for event in events:
                if event.kind == "finished":
                    assert event.result is not None
                    seconds = event.result.time_s.get("total") or time.monotonic() - started
                    return CellOutcome(result=event.result, rewards=rewards, seconds=seconds)
                if stop.is_set():
                    raise Stopped
                _note_reward(work_folder(launch, run_id(config)), rewards)
                reason = verdict(rewards)
                if reason is not None:
                    events.close()
                    result = _give_up(config, launch, reason)
                    return CellOutcome(result=result, rewards=rewards, seconds=time.monotonic() - started)
        finally:
            events.close()
        raise AssertionError("a launcher ended without a finished event")


def _note_reward(work: Path, rewards: dict[int, float]) -> None:
    with suppress(OSError, ValueError, KeyError):  # it may be replaced while it is read; the next look sees it
        shown = json.loads((work / "progress.json").read_text(encoding="utf-8"))
        if shown["step"]:
            rewards[int(shown["step"])] = float(shown["reward"])


def _give_up(config: RunConfig, launch: Launch, reason: str) -> RunResult:
    """The record of a cell that was stopped for good; its saved state goes."""
    result = record(config, launch, None, {}, "cancelled", GIVEN_UP + reason, None)
    write_result(record_path(launch, run_id(config)).parent, result, None)
    shutil.rmtree(work_folder(launch, run_id(config)), ignore_errors=True)
    return result


@contextmanager
def _claimed(path: Path, stop: threading.Event) -> Generator[None, None, None]:
    """Hold a cell's lock file; freed when the process dies, and removed when done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = path.open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before removes the file: without a name, or with another one, the lock is on nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                    break
        except BlockingIOError:
            pass
        handle.close()
        if stop.wait(0.2):
            raise Stopped
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        handle.close()
