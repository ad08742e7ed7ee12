"""The queue of a launcher whose cells run elsewhere: start, listen, collect, and stop all of them at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from harness.config.load import run_id
from harness.records.run_result import RunResult
from harness.sweep.launchers.bases import bases_of, next_job
from harness.sweep.launchers.job import Admit, Event, Job
from harness.sweep.launchers.local import GRACE_S, POLL_S, failed


class Remote(Protocol):
    """A cell that runs elsewhere."""

    job: Job
    trains: Path | None
    """The base that it trains first; None where it found it at its start, or needs none."""

    def news(self) -> Iterator[Event]:
        """Events since the last time."""
        ...

    def outcome(self) -> RunResult | None:
        """The record of the cell, once there is one."""
        ...

    def ask_to_stop(self) -> None:
        """Ask the cell to save its state and end, and do not wait for it."""
        ...

    def stop(self, deadline: float) -> None:
        """End the cell, by `time.monotonic() == deadline` at the latest if it does not end by itself."""
        ...


Start = Callable[[Job, Path | None], Remote]
"""(job, folder of its base) -> the started cell. Raises ValueError or OSError where it cannot start."""


def run_remote(jobs: Sequence[Job], workers: int, admit: Admit, start: Start) -> Generator[Event, None, None]:
    """Run every job that `admit` lets start, at most `workers` at a time, in order.

    Every such job ends in one `finished` event with its record. Closing the iterator stops the running cells.
    """
    bases, waiting, running = bases_of(jobs), list(jobs), list[Remote]()
    try:
        while True:
            while len(running) < workers:
                if (job := next_job(waiting, admit, bases, [cell.trains for cell in running])) is None:
                    break
                waiting.remove(job)
                try:
                    running.append(start(job, bases[run_id(job.config)]))
                except (OSError, ValueError) as error:
                    yield Event(kind="finished", config=job.config, result=failed(job, f"not started: {error}"))
            if not running:
                return
            time.sleep(POLL_S)
            for cell in list(running):
                yield from cell.news()
                if (result := cell.outcome()) is not None:
                    running.remove(cell)
                    yield Event(kind="finished", config=cell.job.config, result=result)
    finally:
        for cell in running:
            cell.ask_to_stop()
        deadline = time.monotonic() + GRACE_S + 10.0
        for cell in running:
            cell.stop(deadline)
