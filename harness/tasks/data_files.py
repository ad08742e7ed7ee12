"""Rows of parquet, JSON-lines and JSON files, local or fetched from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.foundation.data_hash import SUFFIXES

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
OTHERS = "; 'task.options.columns={question: NAME, answer: NAME}' names others"
"""End of a message about a column that a file lacks."""


def find_files(
    task: str, hub: str, folder: str | None, split: str, path: str | None, revision: str | None
) -> tuple[Path, ...]:
    """The files of `split`: under `path` (a file is every split), else under a snapshot of the hub repository.

    A file belongs to a split if its name or a folder below the root names it; files that name none serve every one.
    """
    root = Path(path).expanduser() if path is not None else _snapshot(task, hub, folder, revision)
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ValueError(f"data file {root}: expected one of {', '.join(SUFFIXES)}")
        return (root,)
    if not root.is_dir():
        raise ValueError(
            f"data path {root} does not exist: task {task!r} expects a file or folder in the form of {hub}"
        )
    if folder is not None and (root / folder).is_dir():
        root = root / folder
    files = sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    files = [f for f in files if f.suffix != ".json"] or files  # beside others .json is about the data
    if not files:
        kinds = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise ValueError(f"data folder {root} has no {kinds} file: task {task!r} expects those of {hub}")
    words = {file: _words(file.relative_to(root)) for file in files}
    named = [f for f in files if split in words[f]]
    if chosen := named or [f for f in files if words[f].isdisjoint(SPLITS)]:
        return tuple(chosen)
    known = ", ".join(sorted(set(SPLITS).intersection(set().union(*words.values()))))
    raise ValueError(
        f"data folder {root} has no split {split!r}: it has {known}; the options train_split and eval_split take "
        "another name, or none"
    )


def read_rows(
    files: Sequence[Path], columns: Mapping[str, Sequence[str]], once: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, values by the keys of `columns`) of each row; with `once`, one of the keys, only the first
    row of each of its values, in whichever file. An index is no such key: it restarts at 0 in every set.

    Each key names its column by alternatives, of which the first that exists counts; a dot goes into a struct.
    ValueError names the file and what was expected of it.
    """
    seen: set[bytes] = set()
    distinct = None if once is None else columns[once]
    for file in files:
        is_parquet = file.suffix == ".parquet"  # its reader leaves repetitions out itself
        read = _json_list if file.suffix == ".json" and _is_list(file) else _json_lines
        for number, row in _parquet(file, columns, distinct, seen) if is_parquet else read(file):
            place = f"data file {file} row {number}"
            values = {key: _first(row, names, place) for key, names in columns.items()}
            if is_parquet or once is None or _is_new(values[once], seen):
                yield place, values


def _snapshot(task: str, hub: str, folder: str | None, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"{folder}/*{suffix}" if folder is not None else f"*{suffix}" for suffix in SUFFIXES]
    try:
        return Path(snapshot_download(hub, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"task {task!r}: cannot fetch data set {hub} from the hub ({reason}): set the path of a local copy"
        ) from error


def _words(path: Path) -> set[str]:
    return {word for part in path.parts for word in re.split(r"[^a-z0-9]+", part.lower())}


def _parquet(
    file: Path, columns: Mapping[str, Sequence[str]], distinct: Sequence[str] | None, seen: set[bytes]
) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = {name.split(".")[0] for names in columns.values() for name in names}
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            present = table.schema_arrow.names
            _check_columns(file, present, columns)
            for batch in table.iter_batches(batch_size=8192, columns=[name for name in present if name in wanted]):
                fresh = list(range(len(batch)))
                if distinct is not None:  # nearly all rows of DAPO-Math-17k repeat: those are left unconverted
                    name = next(name for name in distinct if name.split(".")[0] in present)
                    top = name.split(".")[0]
                    values = (_value({top: value}, name) for value in batch.column(top).to_pylist())
                    fresh = [i for i, value in enumerate(values) if _is_new(value, seen)]
                for i, row in zip(fresh, batch.take(pa.array(fresh, pa.int64())).to_pylist(), strict=True):
                    yield number + i + 1, row
                number += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"data file {file} is not readable parquet: {str(error).splitlines()[0]}") from error


def _is_list(file: Path) -> bool:
    """True where the first sign of a .json file opens a list; JSON lines are published under this name, too."""
    try:
        with file.open(encoding="utf-8-sig") as handle:
            return next(filter(str.strip, handle), "[").lstrip().startswith("[")
    except (OSError, UnicodeDecodeError):  # which the reader tells
        return True


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"data file {file} line {number} is no JSON object")
                yield number, row
    except OSError as error:
        raise ValueError(f"cannot read data file {file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        place = f"data file {file} line {number}"
        raise ValueError(f"{place} is not valid JSON: {error.msg}, column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"data file {file} is not valid JSON lines: {error}") from error


def _json_list(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read data file {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data file {file} is not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"data file {file} is not a JSON list of objects")
    yield from enumerate(rows, start=1)


def _is_new(value: Any, seen: set[bytes]) -> bool:
    """True where no row before had this value. Blanks do not count, as in a question's key."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).digest()
    is_new = digest not in seen
    seen.add(digest)
    return is_new


def _check_columns(file: Path, present: Sequence[str], columns: Mapping[str, Sequence[str]]) -> None:
    for names in columns.values():
        if not any(name.split(".")[0] in present for name in names):
            wanted = " or ".join(repr(name) for name in names)
            raise ValueError(f"data file {file} has no column {wanted}: it has {', '.join(sorted(present))}{OTHERS}")


def _first(row: Mapping[str, Any], names: Sequence[str], place: str) -> Any:
    for name in names:
        if name.split(".")[0] in row:
            return _value(row, name)
    wanted = " or ".join(repr(name) for name in names)
    raise ValueError(f"{place} has no {wanted}: it has {', '.join(sorted(row))}{OTHERS}")


def _value(row: Mapping[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
