"""One cell of a trial: found if it has a record, run if not, given up where a rule says so; never run twice at once."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.foundation.lock_file import held
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


def is_settled(result: RunResult) -> bool:
    """Need the cell of this record not run again?"""
    is_given_up = result.status == "cancelled" and (result.reason or "").startswith(GIVEN_UP)
    return is_given_up or result.status in FINISHED


def run_one(
    config: RunConfig, launch: Launch, runner: Runner, stop: threading.Event, verdict: Verdict = lambda rewards: None
) -> CellOutcome:
    """The outcome of a cell, run where it has none. Raises Stopped, after the cell has saved its state."""
    lock = lock_folder(Path(launch.results), "cells") / f"{run_id(config)}.lock"
    with held(lock, partial(_until, stop)):
        path = record_path(launch, run_id(config))
        if path.exists() and is_settled(found := read_result(path)):
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


def _until(stop: threading.Event) -> None:
    """A pause between two looks at another worker's cell. Raises Stopped once the search is to stop."""
    if stop.wait(0.2):
        raise Stopped
