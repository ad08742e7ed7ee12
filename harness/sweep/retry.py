"""Retries and the time limit of a sweep: classes of failure, and attempts at a cell.

    jobs -> round of the launcher -> out of memory: with layer checkpoints, then with halved micro-batches
                                     lost, hung, crowded out: again, a bounded number of times
                                     anything else: a bug or bad input fails the same way again

A divergence is a result. A limit withholds cells that would be late; those that run it stops only when it is reached.
Left out: how cells run (`harness.sweep.launchers`) and how long they take (`harness.sweep.forecast`).
"""

from __future__ import annotations

import math
import re
import time
from bisect import insort
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.records.run_result import RunResult
from harness.run.cell import work_folder
from harness.sweep.launchers.job import Admit, Event, Job

MAX_LOST = 2
"""Restarts of a cell that was lost or hung, at most."""
MAX_MEMORY = 3
"""Restarts of a cell that ran out of memory, at most, each with a thriftier launch, which leaves its run id alone."""
MIN_TOKENS = 256
"""Smallest micro-batch in tokens: halving further saves too little memory for another attempt."""
OUT_OF_MEMORY = re.compile(
    r"^(?:torch\.)?OutOfMemoryError\b|^MemoryError\b|^(?:RuntimeError|AcceleratorError): .*(?:can't allocate memory"
    r"|CUDA out of memory|CUDA [Ee]rror: out of memory|CUBLAS_STATUS_ALLOC_FAILED)|^OSError: \[Errno 12\]",
    re.DOTALL,
)
"""Reasons of records: torch on a GPU, Python (and the kernel's killer, as launchers say it), torch's CPU allocator,
CUDA itself and vLLM's engine as it wakes, cuBLAS, the kernel."""
CROWDED = re.compile("EADDRINUSE|node running low on memory|is less than desired GPU memory utilization")
"""In reasons of records, what other cells did: the port that a process had found free was another's when it came to
listen there; Ray saw the machine's memory full and killed processes; vLLM found a GPU full at its start."""
MEMORY, LOST = "out of memory", "lost"
PACE_CELLS = 3
"""Number of finished cells from which on their own speed corrects the predictions for the rest."""
MARGIN = 1.1
"""Factor on the predicted time of a cell: it is started if it would still end in time."""


class Runner(Protocol):
    """A launcher (`harness.sweep.launchers.job`) with its number of workers."""

    def __call__(self, jobs: Sequence[Job], *, admit: Admit) -> Generator[Event, None, None]: ...


def failure_class(result: RunResult) -> str | None:
    """MEMORY, LOST, or None for what another attempt would not change."""
    reason = result.reason or ""
    if result.status != "failed":
        return None
    if CROWDED.search(reason) or reason.startswith(("lost: ", "hung: ")):
        return LOST
    return MEMORY if OUT_OF_MEMORY.search(reason) else None


def next_launch(result: RunResult, launch: Launch) -> Launch | None:
    """The launch of another attempt at a failed cell, what happened and what changes noted in it; None: no more."""
    found = failure_class(result)
    before = sum(line.startswith(f"{found}: ") for line in launch.retries)
    reason = " ".join((result.reason or "").split())[:200]
    if found == MEMORY and before < MAX_MEMORY and (saved := _thriftier(launch)) is not None:
        field, value = saved
        line = f"{MEMORY}: {reason}; {field} {getattr(launch, field)} -> {value}"
        return replace(launch, **{field: value}, retries=(*launch.retries, line))
    if found == LOST and before < MAX_LOST:
        line = f"{LOST}: {reason.removeprefix('lost: ')}; started again"
        return replace(launch, retries=(*launch.retries, line))
    return None


def _thriftier(launch: Launch) -> tuple[str, Any] | None:
    """(field of the launch, its next value): layer checkpoints first, which change no bit of a run, then half the
    micro-batch; None where that is too small."""
    if not launch.checkpoint_layers:
        return "checkpoint_layers", True
    half = launch.micro_batch_tokens // 2
    return ("micro_batch_tokens", half) if half >= MIN_TOKENS else None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Time limit of a sweep, and the measured speed of its cells. Times are of `clock`, in seconds."""

    end: float
    predict: Callable[[RunConfig], float]
    """Predicted seconds of a whole cell."""
    clock: Callable[[], float] = time.monotonic
    ratios: list[float] = field(default_factory=list[float])
    """Measured over predicted time of cells that ran here from their first step to their last, sorted."""

    def admits(self, begun: Set[int], job: Job) -> bool:
        """Would the job end in time if it started now? One that was begun (by its `id`) loses nothing if not."""
        pace = self.ratios[len(self.ratios) // 2] if len(self.ratios) >= PACE_CELLS else 1.0
        seconds = 0.0 if id(job) in begun else MARGIN * pace * self.predict(job.config)
        return self.clock() + seconds <= self.end


def is_begun(job: Job) -> bool:
    """Has an earlier attempt left a state to go on from?"""
    work = work_folder(job.launch, run_id(job.config))
    return (work / "state.pt").exists() or any(work.glob("verl/checkpoints/*"))


def in_rounds(jobs: Sequence[Job], run: Runner, limit: Limit | None = None) -> Generator[Event, None, None]:
    """Run the jobs, those begun before first, then again those worth another attempt, until none is left or none would
    end before the limit.

    At the limit, or when the generator is closed, running cells are stopped: they save their state.
    """
    limit = limit or Limit(end=math.inf, predict=lambda config: 1.0)
    while True:
        begun = {id(job) for job in jobs if is_begun(job)}
        if not any(limit.admits(begun, job) for job in jobs):
            return
        jobs = yield from _one_round(sorted(jobs, key=lambda job: id(job) not in begun), begun, run, limit)


def _one_round(
    jobs: Sequence[Job], begun: Set[int], run: Runner, limit: Limit
) -> Generator[Event, None, Sequence[Job]]:
    """One pass of the launcher. Returns the jobs that are worth another attempt."""
    left, started, again = {run_id(job.config): job for job in jobs}, dict[str, float](), list[Job]()
    admit = partial(limit.admits, begun)
    events = run(jobs, admit=admit)
    try:
        for event in events:
            yield event
            if event.kind == "started":
                started[run_id(event.config)] = limit.clock()
            elif event.result is not None:
                job, began = left.pop(cell_id := run_id(event.config)), started.pop(cell_id, None)
                if (launch := next_launch(event.result, job.launch)) is not None:
                    again.append(Job(config=job.config, launch=launch))
                elif event.result.status == "ok" and began is not None and id(job) not in begun:
                    insort(limit.ratios, (limit.clock() - began) / max(1e-9, limit.predict(job.config)))
            if limit.clock() >= limit.end:
                return again
        assert not started and not any(map(admit, left.values())), "a launcher ended without an event for every cell"
    finally:
        events.close()
    return again
