"""Folders that can be written, asked before a command works for what it will write there."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile


def check_writable(folder: Path, option: str) -> None:
    """Make the folder, where it is missing, and a file that does not stay. Raises ValueError naming the option that
    chose it where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder}: nothing can be written there: {error.strerror}") from error
