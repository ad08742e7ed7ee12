"""A launcher that runs nothing: cells take simulated seconds and end as the test says."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.load import run_id
from harness.records.run_result import RunResult, write_result
from harness.run.record import record
from harness.sweep.launchers.job import Admit, Event, Job
from harness.sweep.retry import Runner

Ending = tuple[str, str | None]
"""(status, reason)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Requests to the launcher; the last entry of `now` is the simulated time."""

    now: list[float] = field(default_factory=lambda: [0.0])
    rounds: list[list[Job]] = field(default_factory=list[list[Job]])
    starts: list[tuple[Job, float]] = field(default_factory=list[tuple[Job, float]])
    ends: list[tuple[Job, float]] = field(default_factory=list[tuple[Job, float]])
    stopped: list[tuple[Job, float]] = field(default_factory=list[tuple[Job, float]])
    progress: dict[str, float] = field(default_factory=dict[str, float])
    """Run id -> seconds of it that are done and saved."""

    def clock(self) -> float:
        """The simulated time."""
        return self.now[-1]


def result_of(job: Job, ending: Ending) -> RunResult:
    """A record as a cell would leave it."""
    result = record(job.config, job.launch, None, {}, ending[0], ending[1], None)
    return result.model_copy(update={"retries": list(job.launch.retries)})


def launcher(
    seen: Seen,
    workers: int = 1,
    seconds: Callable[[Job], float] = lambda job: 1.0,
    ending: Callable[[Job], Ending] = lambda job: ("ok", None),
) -> Runner:
    """`run_cells` of the simulation; a tick is a second, records are written where the job says."""

    def run(jobs: Sequence[Job], *, admit: Admit) -> Generator[Event, None, None]:
        seen.rounds.append(list(jobs))
        waiting, running = list(jobs), list[Job]()
        try:
            while True:
                while len(running) < workers and (job := next(filter(admit, waiting), None)) is not None:
                    waiting.remove(job)
                    running.append(job)
                    seen.starts.append((running[-1], seen.clock()))
                    yield Event(kind="started", config=running[-1].config, pid=1)
                if not running:
                    return
                seen.now.append(seen.clock() + 1)
                for job in list(running):
                    cell = run_id(job.config)
                    seen.progress[cell] = done = seen.progress.get(cell, 0.0) + 1
                    if done < seconds(job):
                        step = int(job.config.trainer.steps * done / seconds(job))
                        yield Event(kind="progress", config=job.config, step=step)
                        continue
                    running.remove(job)
                    del seen.progress[cell]
                    seen.ends.append((job, seen.clock()))
                    result = result_of(job, ending(job))
                    rows = [{"train/loss": 0.0}] if result.status == "ok" else None
                    write_result(Path(job.launch.results) / "runs" / job.launch.sweep, result, rows)
                    yield Event(kind="finished", config=job.config, result=result)
        finally:
            seen.stopped.extend((job, seen.clock()) for job in running)

    return run
