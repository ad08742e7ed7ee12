"""Jobs and events of a launcher: a cell with its launch, and the events of its life.

Every launcher is a function `run_cells(jobs, workers, ..., admit) -> Generator[Event, None, None]`: whenever fewer than
`workers` run it starts the first waiting job that `admit` lets pass at that moment and whose base no other cell trains;
it ends when none runs and none may start. A job that starts ends in exactly one `finished` event; closing the generator
stops the running cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.config.schema import Launch, RunConfig
from harness.records.run_result import RunResult


@dataclass(frozen=True, kw_only=True)
class Job:
    """A cell to run."""

    config: RunConfig
    launch: Launch


Admit = Callable[[Job], bool]
"""May the job start now? Asked anew before every start."""


def always(job: Job) -> bool:
    """Admit every job."""
    return True


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event in the life of a cell."""

    kind: Literal["started", "progress", "finished"]
    config: RunConfig
    pid: int = 0
    """Number of the cell's process (started)."""
    step: int = 0
    """Steps done so far (progress)."""
    note: str | None = None
    """Line about what it does before its first step (progress)."""
    result: RunResult | None = None
    """Record of the cell (finished)."""
