"""Bases of a launcher's jobs: one cell trains a base, the others of that base wait until it is there.

Cells of other bases go before them, so several bases train side by side, and no worker is held for a base that another
one trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.config.load import run_id
from harness.start.prepare import base_folder
from harness.sweep.launchers.job import Admit, Job


def bases_of(jobs: Sequence[Job]) -> dict[str, Path | None]:
    """Run id -> folder of the base; None where there is none, or it cannot be named, which the cell says itself."""
    return {run_id(job.config): _base(job) for job in jobs}


def _base(job: Job) -> Path | None:
    try:
        return base_folder(job.config, job.launch)
    except ValueError:
        return None


def untrained(base: Path | None) -> Path | None:
    """The base, where it is not there yet."""
    return None if base is None or base.is_dir() else base


def next_job(
    waiting: Iterable[Job], admit: Admit, bases: Mapping[str, Path | None], trains: Iterable[Path | None]
) -> Job | None:
    """The first job that `admit` lets pass and whose base no running cell trains. `bases`: of `bases_of`; `trains`: the
    base that each running cell trains first, None where it found it at its start."""
    training = {untrained(base) for base in trains} - {None}
    return next(filter(admit, (job for job in waiting if bases[run_id(job.config)] not in training)), None)
