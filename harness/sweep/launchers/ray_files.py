"""Files exchanged between a results folder and a cell on a Ray node, as bytes: bases, states, records."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from harness.config.load import run_id
from harness.foundation.whole_file import write_atomic
from harness.records.paths import bases_folder, rollouts_path
from harness.records.run_result import RunResult
from harness.run.cell import record, record_path, work_folder
from harness.start.base_model import read_record
from harness.sweep.launchers.deaths import REQUESTED
from harness.sweep.launchers.job import Job
from harness.sweep.launchers.local import clean, failed, refuse_foreign
from harness.sweep.launchers.ray_cell import CellFiles, Files


def files_for(job: Job, base: Path | None) -> Files:
    """Files that a cell finds in its scratch folder: its base, and where it was stopped before its state and
    responses.

    Raises ValueError or OSError where one of them cannot be read.
    """
    results, files = Path(job.launch.results), dict[str, bytes]()
    if base is not None and base.is_dir():
        read_record(base)
        files |= {str(path.relative_to(results)): path.read_bytes() for path in base.iterdir() if path.is_file()}
    state = work_folder(job.launch, run_id(job.config)) / "state.pt"
    for path in (state, rollouts_path(results, job.launch.sweep, run_id(job.config))) if state.exists() else ():
        if path.exists():
            files[str(path.relative_to(results))] = path.read_bytes()
    return files


def keep(job: Job, outcome: CellFiles) -> RunResult:
    """Write what a cell made into the results folder; its record, or one that says why there is none."""
    results, path = Path(job.launch.results), record_path(job.launch, run_id(job.config))
    own, series = str(path.relative_to(results)), str(path.with_suffix(".parquet").relative_to(results))
    try:
        _store_base(results, {name: data for name, data in outcome.files.items() if name.startswith("bases/")})
        for name in outcome.files:
            if name.startswith(("work/", "rollouts/")):
                write_atomic(results / name, outcome.files[name])
        if own in outcome.files:
            refuse_foreign(job)
            if series in outcome.files:
                write_atomic(results / series, outcome.files[series])
            else:
                (results / series).unlink(missing_ok=True)
            write_atomic(path, outcome.files[own])
    except (OSError, ValueError) as error:
        return failed(job, f"the record could not be written: {error}")
    result = outcome.result
    if result is None or result.status == "cancelled":
        return record(job.config, job.launch, None, {}, "cancelled", REQUESTED, None)
    if result.status == "ok":
        clean(job)
    return result if own in outcome.files else failed(job, result.reason or "no record came back", result.error)


def _store_base(results: Path, files: Files) -> None:
    """Store the folder of a base that a cell trained, whole or not at all."""
    for name in {Path(path).parent.name for path in files}:
        folder = bases_folder(results) / name
        part = folder.with_name(f".{name}.{os.getpid()}.part")
        for path, data in files.items():
            if Path(path).parent.name == name:
                write_atomic(part / Path(path).name, data)
        with suppress(OSError):  # it came from elsewhere in the meantime
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)


def write_base(job: Job, files: Files) -> None:
    """Bring the base that a cell trained home, for the cells that wait for it and in case its worker is lost."""
    with suppress(OSError, ValueError):  # of a full disk the cell's end tells
        _store_base(Path(job.launch.results), files)


def write_state(job: Job, state: bytes) -> None:
    """Bring a cell's state home, for its next attempt."""
    with suppress(ValueError):  # a full disk costs the point to resume from, not the run
        write_atomic(work_folder(job.launch, run_id(job.config)) / "state.pt", state)
