"""Locks that processes wait for: files that one holds while the others look again, and folders of a process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAUSE_S = 0.02


def _pause() -> None:
    time.sleep(PAUSE_S)


@contextmanager
def held(path: Path, pause: Callable[[], None] = _pause) -> Iterator[None]:
    """Hold an exclusive lock file. The system frees it when the process dies; it is removed when done.

    `pause` is called as long as another process or thread holds it, and waits a little; what it raises ends the wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = path.open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us removes the file: if the name is gone or taken anew, our lock is on nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                    break
        except BlockingIOError:
            pass
        handle.close()
        pause()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        handle.close()


@contextmanager
def folder_held(folder: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made, and removed when done if nothing is in it. Raises ValueError with the
    words of `refusal` where somebody else holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(refusal) from None
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()
        os.close(handle)


def wait_until_free(folder: Path) -> None:
    """Wait for the process that holds the lock of a folder, where there is one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)
