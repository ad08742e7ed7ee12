"""The lock of a results folder: one sweep or import at a time, or any number of searches.

It is the system's (`flock`), so it is free again when its process dies, however that happens. The processes are those
of one machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_folder(results: Path) -> None:
    """Raises ValueError where no results folder can be: at the path, or at one that it lies in, is a file. Makes
    nothing, and leaves permissions to what writes."""
    there = next(path for path in (results, *results.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise _unwritable(results, os.strerror(errno.ENOTDIR))


@contextmanager
def results_lock(results: Path, *, is_shared: bool = False, who: str = "a sweep") -> Iterator[None]:
    """Hold the lock of `results`, alone or (`is_shared`) with others that share it. Makes the folder. `who` is what a
    command that is refused is told to be at work.

    Raises ValueError where the folder cannot be written, or somebody else holds the lock.
    """
    check_folder(results)
    try:
        results.mkdir(parents=True, exist_ok=True)
        handle = (results / ".lock").open("a+")
    except OSError as error:
        raise _unwritable(results, error.strerror) from None
    with handle:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or f"{'a sweep' if is_shared else 'a search'} is at work there"
            raise ValueError(f"results={results}: {holder}") from None
        handle.truncate(0)
        handle.write("" if is_shared else f"{who} is at work there (process {os.getpid()})")
        handle.flush()
        yield


def _unwritable(results: Path, reason: str | None) -> ValueError:
    return ValueError(f"results={results}: cannot be written: {reason}")
