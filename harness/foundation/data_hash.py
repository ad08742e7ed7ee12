"""Hash of a data set on disk: a file, or a folder of them. Left out: reading rows (`harness.tasks.data_files`)."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

SUFFIXES = (".parquet", ".jsonl", ".json")
"""Endings of data files."""


def data_hash(path: Path | str) -> str | None:
    """SHA-256 (hexadecimal) of a data file, or of the names and contents of all data files under a folder; None where
    there is neither. Files that have not changed are read once in a process."""
    root = Path(path).expanduser()
    files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        name = "" if file == root else file.relative_to(root).as_posix()
        digest.update(f"{name} {_file_hash(file.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@cache
def _file_hash(file: Path, *state: int) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
