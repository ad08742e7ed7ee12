"""What a launcher is given and what it tells back: a cell with its launch, and the events of its life.

Every launcher is a function `run_cells(jobs, workers, ...) -> Generator[Event, None, None]`: each job is started in
order, `workers` at a time, and ends in exactly one `finished` event; closing the generator stops the running cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.results import RunResult
from harness.run_config import Launch, RunConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """A cell to run."""

    config: RunConfig
    launch: Launch


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to a cell."""

    kind: Literal["started", "progress", "finished"]
    config: RunConfig
    pid: int = 0
    """Of the cell's process (started)."""
    step: int = 0
    """Steps done so far (progress)."""
    result: RunResult | None = None
    """Its record (finished)."""
