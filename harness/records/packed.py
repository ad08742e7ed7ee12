"""A large sweep in one file of the repository: every record, and the series that tables and figures read.

    results/packed/<sweep>.zip      records.jsonl  (a record per line)   series.parquet  (a row per run and step)
                                    purpose.yaml   (of a sweep that `sweeps/` does not tell)

`unpack` makes the files of `harness.records.run_result` of it again, where they are missing: records byte for byte,
and of the series the columns COLUMNS and GROUPS. Hundreds of cells then cost a repository a few MB. Left out: all other
columns of the series, which stay on the machine that ran the sweep.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.config.validation import in_words
from harness.foundation.whole_file import write_atomic
from harness.records.paths import PURPOSE, packed_path, packed_paths, purpose_path, runs_folder, work_folder
from harness.records.run_result import (
    RunResult,
    read_result,
    read_results,
    read_series,
    series_bytes,
    write_result,
)
from harness.records.statuses import TO_RUN_AGAIN

_RUN_ID = re.compile(rb'"run_id":"([^"]*)"')
"""The run of a line of records: the first of its kind in it."""
COLUMNS = (
    "reward/mean", "reward/accuracy", "reward/best_of_group", "rollout/length_mean", "rollout/truncated_frac",
    "rollout/tokens", "sync/code_flip_rate", "sync/saturated_frac", "mismatch/kl_k1", "mismatch/kl_k3",
    "mismatch/chi2_token", "mismatch/ess_token", "mismatch/ess_token_raw", "mismatch/logp_absdiff_mean",
    "mismatch/logp_absdiff_p99", "mismatch/logp_absdiff_p999", "mismatch/logp_absdiff_max", "train/entropy",
    "train/grad_norm", "train/ppo_kl", "train/clip_frac", "train/clip_low_frac", "train/clip_high_frac",
    "train/clip_dual_frac", "train/loss_scale", "train/skipped", "correction/weight_mean",
    "correction/token_kept_frac", "by_position/position", "by_position/k3", "by_position/count",
    "by_entropy/entropy", "by_entropy/k3", "by_entropy/count",
)  # fmt: skip
GROUPS = ("memory/", "part/", "staleness/", "time/")
"""Columns, and groups of them, that a packed sweep keeps of every step."""
RECORDS, SERIES = "records.jsonl", "series.parquet"
DAMAGES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError)
"""Errors of reading a damaged or an encrypted zip archive."""


def pack(results: Path, sweep: str) -> Path:
    """Write `<results>/packed/<sweep>.zip` from the sweep's folder.

    Raises ValueError where the folder has no result, lacks one that the file has, or the series of a run, and where a
    cell was put aside and has not run since.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, path = runs_folder(results, sweep), packed_path(results, sweep)
    records = read_results(folder)
    if not records:
        raise ValueError(f"sweep {sweep}: {folder} holds no result to pack")
    if waiting := [record.run_id for record in records if record.reason == TO_RUN_AGAIN]:
        words = f"{len(waiting)} cells were put aside by --again and have not run since, {waiting[0]} among them"
        raise ValueError(f"sweep {sweep}: {words}; the sweep's command without --again runs them")
    lost = {r.run_id for r in read_packed(path)} - {r.run_id for r in records} if path.exists() else set[str]()
    if lost:
        raise ValueError(
            f"sweep {sweep}: {path} has {len(lost)} results that {folder} lacks, {min(lost)} among them; bring them "
            f"there by `lowbit results unpack {sweep}`, or delete the file to leave them out"
        )
    trained = [record.run_id for record in records if record.num_steps]
    if bare := [run_id for run_id in trained if not (folder / f"{run_id}.parquet").exists()]:
        cure = "bring them back, or delete the records to leave the runs out"
        if path.exists():
            cure = f"`lowbit results unpack {sweep}` restores those that {path} has"
        raise ValueError(f"sweep {sweep}: {folder} lacks the series of {len(bare)} runs, {bare[0]} among them; {cure}")
    all_series = {run_id: read_series(folder, run_id) for run_id in trained}
    grouped = {name for series in all_series.values() for name in series if name.startswith(GROUPS)}
    kept = [*COLUMNS, *sorted(grouped)]
    columns: dict[str, list[Any]] = {"run_id": [], **{name: [] for name in kept}}
    for run_id, series in all_series.items():
        num_steps = len(next(iter(series.values())))
        columns["run_id"] += [run_id] * num_steps
        for name in kept:
            columns[name] += series.get(name, [None] * num_steps)
    kinds = {name: pa.list_(pa.float32()) if name.startswith("by_") else pa.float32() for name in kept}
    table = pa.table({n: pa.array(v, kinds.get(n, pa.string())) for n, v in columns.items()})
    sink, target = io.BytesIO(), io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=19, use_dictionary=["run_id"])  # pyright: ignore[reportArgumentType] - the stub says bool alone
    lines = "".join(json.dumps(r.model_dump(mode="json"), separators=(",", ":")) + "\n" for r in records)
    members = [(RECORDS, lines.encode(), zipfile.ZIP_LZMA), (SERIES, sink.getvalue(), 0)]
    if (aim := purpose_path(results, sweep)).is_file():
        members.append((PURPOSE, aim.read_bytes(), 0))
    with zipfile.ZipFile(target, "w") as archive:
        for name, data, how in members:
            info = zipfile.ZipInfo(name)  # a fixed date: equal results make equal files
            archive.writestr(info, data, compress_type=how)
    write_atomic(path, target.getvalue())
    return path


def unpack(results: Path, sweep: str | None = None) -> int:
    """Write the missing files of packed sweeps (of one, where named); of how many runs there were some. Raises
    ValueError for a file that is no packed sweep."""
    count = 0
    for path in packed_paths(results, sweep or "*"):
        folder, records = runs_folder(results, path.stem), read_packed(path)
        missing = [r for r in records if not (folder / f"{r.run_id}.json").exists()]
        bare = {r.run_id for r in records if _lacks_series(folder, r)}
        rows = _rows(path, {r.run_id for r in missing} | bare) if missing or bare else {}
        if folder.is_dir():
            _write(folder, missing, rows)
            for run_id in (found := bare & rows.keys()):
                write_atomic(folder / f"{run_id}.parquet", series_bytes(rows[run_id]))
            count += len(found)
        else:
            _write_whole(results, folder, missing, rows, _purpose(path))
        count += len(missing)
    return count


def _lacks_series(folder: Path, packed: RunResult) -> bool:
    """Does the folder have this run without its series? Evaluations may have been added to the record since."""
    path = folder / f"{packed.run_id}.json"
    if not packed.num_steps or not path.exists() or path.with_suffix(".parquet").exists():
        return False
    try:
        held = read_result(path)
    except ValueError:
        return False
    return held.model_copy(update={"evaluations": packed.evaluations}) == packed


def _write(folder: Path, records: Sequence[RunResult], rows: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    for record in records:
        write_result(folder, record, rows.get(record.run_id))


def _write_whole(
    results: Path, folder: Path, records: Sequence[RunResult], rows: Mapping[str, Sequence[dict[str, Any]]],
    aim: bytes | None,
) -> None:  # fmt: skip
    """A folder that appears with all its records and its purpose or not at all: one that is there counts as the whole
    sweep."""
    part = work_folder(results, "unpacked") / f"{folder.name}-{os.getpid()}"
    try:
        _write(part, records, rows)
        if aim is not None:
            (part / PURPOSE).write_bytes(aim)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _member(path: Path, name: str) -> bytes:
    """Contents of a file of a packed sweep. Raises ValueError where `path` is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (*DAMAGES, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: not a packed sweep: {reason}") from error


def _purpose(path: Path) -> bytes | None:
    """The purpose that a packed sweep keeps, None where it keeps none."""
    with zipfile.ZipFile(path) as archive:
        return _member(path, PURPOSE) if PURPOSE in archive.namelist() else None


def read_lines(path: Path) -> list[bytes]:
    """The records of a packed sweep as lines of JSON, in its order. Raises ValueError for a file that is none."""
    return _member(path, RECORDS).splitlines()


def read_packed(path: Path, runs: Collection[str] | None = None) -> list[RunResult]:
    """The records of a packed sweep, of all runs or of those that it has of `runs`, in its order. Raises ValueError for
    a file that is none."""
    lines = read_lines(path)
    if runs is not None:
        lines = [line for line in lines if (said := _RUN_ID.search(line)) and said[1].decode() in runs]
    try:
        return [RunResult.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise ValueError(f"{path}: not a packed sweep: {in_words(error)}") from error


def check_packed(path: Path) -> int:
    """Number of records of a packed sweep, all of which are read. Raises ValueError, one line, for a file that is none,
    and where a run that took steps has no series."""
    records, found = read_packed(path), read_packed_series(path, ())
    if lacking := [record.run_id for record in records if record.num_steps and record.run_id not in found]:
        raise ValueError(f"{path}: no series of {', '.join(lacking)}")
    return len(records)


def _table(path: Path, is_wanted: Callable[[str], bool], runs: Collection[str] | None) -> Any:
    """`run_id` and the wanted columns of a packed sweep, a row per step of all its runs or of some. Raises ValueError
    for a file that is no packed sweep."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    source = pa.BufferReader(_member(path, SERIES))
    try:
        with pq.ParquetFile(source) as file:  # by no `read_table`, for the reason that `read_series` names
            names = [name for name in file.schema_arrow.names if name == "run_id" or is_wanted(name)]
            table = file.read(columns=names, use_threads=False)
        if runs is None:
            return table
        is_in: Any = pc.is_in  # pyright: ignore[reportAttributeAccessIssue] - made when the module is imported
        return table.filter(is_in(table["run_id"], value_set=pa.array([*runs], pa.string())))
    except DAMAGES as error:
        raise ValueError(f"{path}: not a packed sweep: {' '.join(str(error).split())}") from error


def read_packed_series(
    path: Path, columns: Collection[str] | None = None, runs: Collection[str] | None = None
) -> dict[str, dict[str, list[Any]]]:
    """Run id -> column -> one value per step of a packed sweep, of all its runs or of some; NaN where a step has none.

    `columns`: those that it does not have are left out; by default all but the profiles. Raises ValueError for a file
    that is no packed sweep.
    """
    table = _table(path, lambda name: not name.startswith("by_") if columns is None else name in columns, runs)
    rows, found = table.to_pydict(), dict[str, dict[str, list[Any]]]()
    ids = rows.pop("run_id")
    for place, run_id in enumerate(ids):
        series = found.setdefault(run_id, {name: [] for name in rows})
        for name, values in rows.items():
            series[name].append(math.nan if values[place] is None else values[place])
    return found


def make_available(results: Path, sweep: str | None = None) -> None:
    """Unpack the sweeps (or the named one) that have no folder of their own yet."""
    for path in packed_paths(results, sweep or "*"):
        if not runs_folder(results, path.stem).is_dir():
            unpack(results, path.stem)


def _rows(path: Path, runs: Collection[str]) -> dict[str, Sequence[dict[str, Any]]]:
    """Run -> one row per step, without what a step does not have."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _table(path, lambda name: True, runs).to_pylist():
        found.setdefault(row.pop("run_id"), []).append(
            {name: value for name, value in row.items() if value is not None}
        )
    return dict(found)
