"""The door to trackers of experiments: start a run, give it parameters, series and artifacts, end it.

Everything that a tracker shows is in the result files, so an outage costs one warning and no run, and what is missing
is logged later (`lowbit results import`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zlib import crc32

from tqdm import tqdm

from harness.records.run_result import RunResult, read_series
from harness.viewers.tracking import facts
from harness.viewers.tracking.facts import Point


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A finished run of a sweep, as a tracker is told of it."""

    sweep: str
    result: RunResult
    path: Path
    """Its record."""
    key: str
    """The file and the content of the record: a run that is logged under it is complete."""
    arm: str
    tags: Mapping[str, str]
    start_ms: int | None
    end_ms: int | None


class TrackedRun(Protocol):
    """A run that is open in a tracker."""

    def params(self, values: Mapping[str, str]) -> None:
        """Log parameters, once."""
        ...

    def series(self, points: Sequence[Point], axis: str = "step") -> None:
        """Log numbers by step; `axis` says what their steps count."""
        ...

    def artifact(self, path: Path) -> None:
        """Copy a file to the run."""
        ...

    def end(self) -> None:
        """Close the run as complete, with the status and the time of its end."""
        ...


class Tracker(Protocol):
    """Owner of a connection. After the first outage it is off, and has said so once."""

    name: str
    max_points: int | None
    """Points of a curve that it is given; None takes all."""

    @property
    def is_on(self) -> bool:
        """Does it still take runs?"""
        ...

    def start(self, cell: Cell) -> TrackedRun | None:
        """Open a run for a cell; None where it is logged already."""
        ...

    def outages(self) -> tuple[type[Exception], ...]:
        """Errors that it raises when its store is down, full, locked or broken."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Be silent from here on, after one warning."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


def log_cell(
    tracker: Tracker,
    sweep: str,
    result: RunResult,
    folder: Path,
    *,
    label: str | None = None,
    tags: Mapping[str, str] | None = None,
    samples: Sequence[Point] = (),
) -> int:
    """Log the result of `<folder>/<run_id>.json`: 1, or 0 where it was there.

    `label` names the arm where it is known, `tags` are added (a search's trial), `samples` are system metrics taken
    while the cell ran. An outage warns and returns 0, and so does a series that cannot be read.
    """
    if not tracker.is_on:
        return 0
    try:
        path, name = folder / f"{result.run_id}.json", label or facts.plain_name(result)
        start_ms, end_ms = (facts.milliseconds(stamp) for stamp in (result.started_at, result.ended_at))
        own = facts.cell_tags(sweep, result) | {"arm": name} | dict(tags or {})
        own["system_metrics"] = facts.LIVE if samples else facts.REBUILT
        cell = Cell(sweep=sweep, result=result, path=path, key=cell_key(sweep, path), arm=name, tags=own,
                    start_ms=start_ms, end_ms=end_ms)  # fmt: skip
        parquet = path.with_suffix(".parquet")
        series = read_series(folder, result.run_id) if parquet.exists() else {}
        if (run := tracker.start(cell)) is None:
            return 0
        run.params(facts.cell_params(result))
        run.series(facts.cell_points(result, series, tracker.max_points))
        if samples:
            run.series(samples, axis="sample")
        for file in filter(Path.exists, (path, parquet)):
            run.artifact(file)
        run.end()
        return 1
    except ValueError as error:
        print(f"warning: left alone: {error}", file=sys.stderr)
    except tracker.outages() as error:
        tracker.give_up(error)
    return 0


def log_cells(
    tracker: Tracker, sweep: str, runs: Sequence[RunResult], folder: Path, labels: Mapping[str, str],
    tags: Mapping[str, Mapping[str, str]],
) -> int:  # fmt: skip
    """Log runs of one sweep, with a progress bar on a terminal: how many were new."""
    shown = tqdm(runs, unit="run", desc=f"{tracker.name} {sweep}", disable=not (runs and sys.stderr.isatty()))
    return sum(log_cell(tracker, sweep, r, folder, label=labels[r.run_id], tags=tags.get(r.run_id)) for r in shown)


def warn_off(name: str, error: BaseException, option: str = "") -> None:
    """The warning of a tracker that gives up; `option` is the one that names it to `lowbit results import`."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    print(f"warning: {name} is off, runs go on: {reason} (later: lowbit results import{option})", file=sys.stderr)


def cell_key(sweep: str, path: Path) -> str:
    """The key of a cell that is logged completely: its file and the content of that."""
    return f"{sweep}/{path.stem}@{crc32(path.read_bytes()):08x}"
