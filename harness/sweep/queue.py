"""Queue of a sweep: cells without a result run, one sweep at a time in a results folder.

Every planned cell leaves a record, impossible ones too (status `skipped`). A file that is no record of the sweep stops
everything before it starts and is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.config.load import identity, run_id, to_json
from harness.config.schema import Launch, RunConfig
from harness.foundation.lock_file import wait_until_free
from harness.foundation.provenance import commit
from harness.foundation.whole_folder import replacing
from harness.records.folder import all_sweeps, place_of, read_place
from harness.records.packed import make_available, read_packed
from harness.records.paths import policy_folder, replaced_folder, rollouts_path, runs_folder
from harness.records.results_lock import results_lock
from harness.records.run_result import RunResult, Settings, check_series, read_result, write_result
from harness.records.statuses import FINISHED, TO_RUN_AGAIN
from harness.records.sweep_file import keep_purpose
from harness.run.cell import record, work_folder
from harness.sweep.launchers.job import Event, Job
from harness.sweep.launchers.local import clean, run_cells
from harness.sweep.planning import Planned
from harness.sweep.retry import Limit, Runner, in_rounds

_SETTINGS = TypeAdapter[dict[str, Any]](Settings)


def records_folder(launch: Launch) -> Path:
    """Folder of the records of a sweep."""
    return runs_folder(launch.results, launch.sweep)


def stored(launch: Launch, cells: Sequence[RunConfig] = ()) -> dict[str, RunResult]:
    """Every record of a sweep by run id: of its folder where it has one, else of its packed file. Raises ValueError,
    one line, naming every file that is none of its records or another one's than the planned cell's whose name it
    bears. Changes nothing."""
    place = place_of(Path(launch.results), launch.sweep)
    if place.is_file():
        return {record.run_id: record for record in read_place(place)}
    planned = {run_id(cell): cell for cell in cells}
    found, wrong = dict[str, RunResult](), list[str]()
    for path in sorted(place.glob("*.json")):
        try:
            result = read_result(path)
            check_owner(path, result, launch, planned.get(path.stem))
        except ValueError as error:
            wrong.append(str(error))
        else:
            found[path.stem] = result
    if wrong:
        cure = "restore it, or move it away (a series with its record)"
        raise ValueError(f"{'; '.join(wrong)}; left alone, nothing was started: {cure}")
    return found


def check_owner(path: Path, result: RunResult, launch: Launch, cell: RunConfig | None) -> None:
    """Raises ValueError for a record of another sweep or another cell, and for a result without its whole series."""
    if result.sweep != launch.sweep:
        raise ValueError(f"{path}: a result of the sweep {result.sweep!r}")
    if cell is not None and not _is_of(result, cell):
        raise ValueError(f"{path}: its configuration is not that of {path.stem}")
    if result.status in FINISHED:
        check_series(path, result)


def _is_of(result: RunResult, cell: RunConfig) -> bool:
    return identity(result.config) == identity(_SETTINGS.validate_python(to_json(cell)))


def finished(config: RunConfig, launch: Launch) -> RunResult | None:
    """The cell's record, where it has one that counts as finished."""
    path = records_folder(launch) / f"{run_id(config)}.json"
    result = read_result(path) if path.exists() else None
    return result if result is not None and result.status in FINISHED else None


def run_sweep(
    planned: Planned, launch: Launch, workers: int, on_event: Callable[[Event], None], *,
    run: Runner | None = None, limit: Limit | None = None,
) -> tuple[list[RunResult], bool]:  # fmt: skip
    """Run the cells that have no result yet, and again those that failed in a way worth it. Returns (all records,
    whether it was interrupted); a planned cell without a record was left for lack of time.

    `run` is a launcher with its number of workers; without it, processes of this machine. Cells without a record that
    another sweep has finished are copied, not run. Raises ValueError where another sweep is at work in the same results
    folder, the folder cannot be written, or holds what is no record.
    """
    run = run or partial(run_cells, workers=workers)
    sha, is_dirty = commit()
    launch = replace(launch, commit=sha, is_dirty=is_dirty)
    with results_lock(Path(launch.results)):
        known = stored(launch, planned.cells)
        keep_purpose(launch.sweep, planned.sweep.purpose, Path(launch.results))
        ids = [run_id(cell) for cell in planned.cells]
        records = {i: known[i] for i in ids if i in known and known[i].status in FINISHED}
        for i, cell in zip(ids, planned.cells, strict=True):  # what a killed sweep left of cells that had finished
            if i in records and records[i].status == "ok" and work_folder(launch, i).is_dir():
                clean(Job(config=cell, launch=launch))
        records |= _note_impossible(planned, launch, known)
        for cell, result in take_over([c for c in planned.cells if run_id(c) not in records], launch):
            records[result.run_id] = result
            on_event(Event(kind="finished", config=cell, result=result))
        jobs = [Job(config=c, launch=launch) for i, c in zip(ids, planned.cells, strict=True) if i not in records]
        events = in_rounds(jobs, run, limit)
        interrupted = False
        try:
            for event in events:
                on_event(event)
                if event.result is not None:
                    records[event.result.run_id] = event.result
        except KeyboardInterrupt:
            interrupted = True
        finally:
            events.close()
        for job in jobs:  # what ended while it was being stopped
            held = records.get(run_id(job.config))
            if (held is None or held.status not in FINISHED) and (found := finished(job.config, launch)) is not None:
                records[found.run_id] = found
                on_event(Event(kind="finished", config=job.config, result=found))
    return list(records.values()), interrupted


def _note_impossible(planned: Planned, launch: Launch, known: dict[str, RunResult]) -> dict[str, RunResult]:
    """Write a record of every impossible cell, so that tables show it; a finished result of old is left as it is."""
    records: dict[str, RunResult] = {}
    for cell, reason in planned.impossible:
        old = known.get(run_id(cell))
        if old is not None and (old.status in FINISHED or old.reason == reason):
            records[old.run_id] = old
            continue
        result = record(cell, launch, None, {}, "skipped", reason, None)
        write_result(records_folder(launch), result, None)
        records[result.run_id] = result
    return records


def put_aside(cells: Sequence[RunConfig], launch: Launch) -> Path | None:
    """Move what these cells left aside (records, states, policies, responses), so that they run again from their start;
    None where they left nothing. A cancelled record stands for each until it has run, so that no later command takes an
    older result in its place; it is not moved itself. Waits for a cell that outlives its launcher."""
    folder = records_folder(launch)
    aside = replaced_folder(launch.results, launch.sweep, datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))
    with results_lock(Path(launch.results)):
        works = [work_folder(launch, run_id(cell)) for cell in cells]
        for held in filter(Path.is_dir, [place for work in works for place in (work, work / "verl")]):
            wait_until_free(held)
        for cell in cells:
            name, path = run_id(cell), folder / f"{run_id(cell)}.json"
            left = {
                aside / name: work_folder(launch, name),
                aside / "policies" / name: policy_folder(launch.results, launch.sweep, name),
                aside / f"{name}.jsonl": rollouts_path(launch.results, launch.sweep, name),
                aside / f"{name}.parquet": path.with_suffix(".parquet"),
                aside / path.name: path,
            }
            is_stand_in = path.exists() and TO_RUN_AGAIN.encode() in path.read_bytes()  # a damaged file is moved
            for target, source in left.items():
                if source.exists() and not (is_stand_in and source == path):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    source.rename(target)
            write_result(folder, record(cell, launch, None, {}, "cancelled", TO_RUN_AGAIN, None), None)
    return aside if aside.is_dir() else None


def take_over(cells: Sequence[RunConfig], launch: Launch) -> list[tuple[RunConfig, RunResult]]:
    """Copy the records of `elsewhere` into this sweep, with their policies where it keeps them: no cell runs twice. A
    packed sweep that has some is unpacked."""
    taken: list[tuple[RunConfig, RunResult]] = []
    for cell, found in elsewhere(cells, launch):
        make_available(Path(launch.results), found.sweep)
        copy = found.model_copy(update={"sweep": launch.sweep})
        series = runs_folder(launch.results, found.sweep) / f"{found.run_id}.parquet"
        if launch.save != "none":  # before the record, which says that the policy is there
            own, theirs = (policy_folder(launch.results, sweep, found.run_id) for sweep in (launch.sweep, found.sweep))
            with replacing(own) as part:
                shutil.copytree(theirs, part, dirs_exist_ok=True)
        write_result(records_folder(launch), copy, series.read_bytes() if series.exists() else None)
        taken.append((cell, copy))
    return taken


def elsewhere(cells: Sequence[RunConfig], launch: Launch) -> list[tuple[RunConfig, RunResult]]:
    """(cell, record) of cells without a record here that another sweep of the same results folder, packed or not,
    finished. Drafts stay where they are, and so do files that cannot be read, cells that ran on another number of GPUs
    or machines, where policies are kept those without one, and all where responses are written out: only a run writes
    them."""
    wanted = {} if launch.dump_rollouts else {run_id(cell): cell for cell in cells}
    wanted = {name: cell for name, cell in wanted.items() if not (records_folder(launch) / f"{name}.json").exists()}
    found_there: dict[str, RunResult] = {}
    results = Path(launch.results)
    for sweep in [name for name in all_sweeps(results) if name != launch.sweep] if wanted else ():
        for found in _finished(results, sweep, wanted.keys() - found_there.keys()):
            is_alike = all(found.launch.get(name, 1) == getattr(launch, name) for name in ("gpus", "nodes"))
            if launch.save != "none":
                is_kept = policy_folder(results, sweep, found.run_id).is_dir()
                is_alike &= is_kept and found.launch.get("save") == launch.save
            if is_alike and _is_of(found, wanted[found.run_id]):
                found_there[found.run_id] = found
    return [(cell, found_there[name]) for name, cell in wanted.items() if name in found_there]


def _finished(results: Path, sweep: str, wanted: Collection[str]) -> list[RunResult]:
    """The wanted runs that a sweep has finished, without drafts and without files that cannot be read."""
    place, found = place_of(results, sweep), list[RunResult]()
    if place.is_file():
        with suppress(ValueError):
            found += read_packed(place, wanted)
    for path in [path for name in sorted(wanted) if (path := place / f"{name}.json").exists()]:
        with suppress(ValueError):
            record = read_result(path)
            check_series(path, record)
            found.append(record)
    return [one for one in found if one.status in FINISHED and not one.is_draft and one.sweep == sweep]
