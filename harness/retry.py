"""What is started again and what is not started any more: classes of failure, attempts, and the time limit of a sweep.

    jobs -> round of the launcher -> out of memory: with layer checkpoints, then with halved micro-batches
                                     lost, hung:    again, a bounded number of times
                                     anything else: a bug or bad input fails the same way again

A divergence is a result. Left out: how cells run (`harness.launchers`) and how long they take (`harness.cost`).
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from harness.config import run_id
from harness.launchers.job import Event, Job
from harness.results import RunResult
from harness.run_config import Launch, RunConfig

MAX_LOST = 2
"""How often a cell that was lost or hung is started again."""
MAX_MEMORY = 3
"""How often a cell that ran out of memory is started again with a thriftier launch, which leaves its run id alone."""
MIN_TOKENS = 256
"""Below this, half a micro-batch saves nothing worth a start."""
OUT_OF_MEMORY = re.compile(
    r"^(?:torch\.)?OutOfMemoryError\b|^MemoryError\b|^(?:RuntimeError|AcceleratorError): .*(?:can't allocate memory"
    r"|CUDA out of memory|CUDA [Ee]rror: out of memory|CUBLAS_STATUS_ALLOC_FAILED)|^OSError: \[Errno 12\]",
    re.DOTALL,
)
"""Reasons of records: torch on a GPU, Python (and the kernel's killer, as launchers say it), torch's CPU allocator,
CUDA itself and vLLM's engine as it wakes, cuBLAS, the kernel."""
MEMORY, LOST = "out of memory", "lost"
PACE_CELLS = 3
"""From so many finished cells on, their own speed corrects the predictions for the rest."""
MARGIN = 1.1
"""A cell is admitted if it would end in time even if it took so many times as long as predicted; squared after the
first round that had to be broken off, and so on."""
Runner = Callable[[Sequence[Job]], Generator[Event, None, None]]


def failure_class(result: RunResult) -> str | None:
    """MEMORY, LOST, or None for what another attempt would not change."""
    reason = result.reason or ""
    if result.status != "failed":
        return None
    if OUT_OF_MEMORY.search(reason):
        return MEMORY
    return LOST if reason.startswith(("lost: ", "hung: ")) else None


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
    """Until when cells may run. Times are of `clock`, in seconds."""

    end: float
    predict: Callable[[RunConfig], float]
    """Seconds a whole cell takes."""
    workers: int
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What the rounds know of the cells so far."""

    jobs: dict[str, Job]
    """Run id -> what is not finished yet, in order."""
    started: dict[str, float] = field(default_factory=dict[str, float])
    """Run id of an unfinished cell -> when it started."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    ratios: list[float] = field(default_factory=list[float])
    """Measured over predicted time of cells that ran without a break."""
    breaks: list[float] = field(default_factory=list[float])
    """When a round was broken off because its next cell would not have ended in time."""

    def remaining_s(self, cell_id: str, limit: Limit) -> float:
        """Predicted seconds until an unfinished cell ends."""
        config = self.jobs[cell_id].config
        pace = median(self.ratios) if len(self.ratios) >= PACE_CELLS else 1.0
        left = 1 - min(1.0, self.steps.get(cell_id, 0) / max(1, config.trainer.steps))
        return pace * left * limit.predict(config)

    def admitted(self, limit: Limit | None) -> list[str]:
        """The unfinished cells to run next: all that were started, then in order those that end in time."""
        if limit is None:
            return list(self.jobs)
        now = limit.clock()
        begun = [cell_id for cell_id in self.jobs if cell_id in self.started]
        slots = sorted([now + self.remaining_s(cell_id, limit) for cell_id in begun] + [now] * limit.workers)
        slots = slots[-limit.workers :]
        heapq.heapify(slots)
        chosen = list(begun)
        for cell_id in self.jobs:
            if cell_id in self.started:
                continue
            seconds = self.remaining_s(cell_id, limit)
            if slots[0] + seconds * MARGIN ** (1 + len(self.breaks)) <= limit.end:
                heapq.heapreplace(slots, slots[0] + seconds)
                chosen.append(cell_id)
        return chosen


def in_rounds(
    jobs: Sequence[Job], run: Runner, limit: Limit | None = None,
    recorded: Callable[[Job], RunResult | None] = lambda job: None,
) -> Generator[Event, None, None]:  # fmt: skip
    """Run the jobs, then again those worth another attempt, until none is left or none fits in before the limit.

    At the limit, or when the generator is closed, running cells are stopped: they save their state. `recorded` finds
    the record of a cell that ended while its round was being stopped.
    """
    rounds = Rounds(jobs={run_id(job.config): job for job in jobs})
    while rounds.jobs and (chosen := rounds.admitted(limit)):
        if limit is not None and limit.clock() >= limit.end:
            return
        yield from _one_round(rounds, chosen, run, limit)
        for cell_id in [cell_id for cell_id in rounds.started if cell_id in rounds.jobs]:
            if (found := recorded(rounds.jobs[cell_id])) is not None:
                job = rounds.jobs.pop(cell_id)
                del rounds.started[cell_id]
                yield Event(kind="finished", config=job.config, result=found)


def _one_round(rounds: Rounds, chosen: Sequence[str], run: Runner, limit: Limit | None) -> Generator[Event, None, None]:
    """One pass of the launcher over the chosen cells. Ends early at the limit, and where the next cell to start would
    not end in time: the running ones go on in the next round."""
    waiting, again = list(chosen), dict[str, Job]()
    ids = {id(rounds.jobs[cell_id].config): cell_id for cell_id in chosen}
    fresh = [cell_id for cell_id in chosen if cell_id not in rounds.started]
    events = run([rounds.jobs[cell_id] for cell_id in chosen])
    try:
        for event in events:
            yield event
            cell_id = ids.get(id(event.config)) or run_id(event.config)
            if event.kind != "progress" and cell_id in waiting:
                waiting.remove(cell_id)
            if event.kind == "started":
                rounds.started[cell_id] = time.monotonic() if limit is None else limit.clock()
            elif event.kind == "progress":
                rounds.steps[cell_id] = event.step
            elif event.result is not None:
                _finish(rounds, cell_id, event.result, again, limit if cell_id in fresh else None)
            if limit is not None and _is_over(rounds, waiting, event, limit):
                return
        assert not waiting and not rounds.started, "a launcher ended without a finished event for every cell"
    finally:
        events.close()
        rounds.jobs.update(again)


def _finish(rounds: Rounds, cell_id: str, result: RunResult, again: dict[str, Job], limit: Limit | None) -> None:
    job, began = rounds.jobs.pop(cell_id), rounds.started.pop(cell_id, None)
    rounds.steps.pop(cell_id, None)
    launch = next_launch(result, job.launch)
    if launch is not None:
        again[cell_id] = Job(config=job.config, launch=launch)
    elif limit is not None and began is not None and result.status == "ok":
        rounds.ratios.append((limit.clock() - began) / max(1e-9, limit.predict(job.config)))


def _is_over(rounds: Rounds, waiting: Sequence[str], event: Event, limit: Limit) -> bool:
    """Is the limit reached, or would the launcher now start a cell that does not end in time?"""
    now = limit.clock()
    if now >= limit.end:
        return True
    if event.kind != "finished" or not waiting or waiting[0] in rounds.started:
        return False
    if now + rounds.remaining_s(waiting[0], limit) <= limit.end:
        return False
    rounds.breaks.append(now)
    return True
