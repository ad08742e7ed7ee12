"""State files of a process: tensors and plain values, written atomically, read without executing anything."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a trainer state atomically; readable with `weights_only=True`.

    Raises ValueError naming the file where it cannot be written (a full disk); an older state then stays.
    """
    temporary = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink()
        # torch reports its own dismay at a short file; what the system said is the context of that
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise ValueError(f"{path}: cannot be written: {getattr(cause, 'strerror', None) or cause}") from error


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote: tensors and plain values, nothing is executed.

    Raises ValueError naming the file where it is not whole. torch reads flipped bits without a word; the checksums of
    the ZIP records, which it writes, tell them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"checksum of {damaged}")
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, ValueError, LookupError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole state: {error}") from error
    except (RuntimeError, pickle.UnpicklingError) as error:
        if "alloc" in str(error):  # memory that ran out says nothing about the file
            raise
        raise ValueError(f"{path}: not a whole state: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a whole state: it holds no dictionary")
    return state


def load_or_set_aside(path: Path, tell: Callable[[str], object]) -> dict[str, Any] | None:
    """The state that `load_state` reads; None where the file is not whole, which is then set aside and told."""
    try:
        return load_state(path)
    except ValueError as error:
        tell(set_aside(path, error))
        return None


def set_aside(path: Path, why: Exception) -> str:
    """Rename a state that cannot be used to end in `.corrupt`; a line that says so."""
    aside = path.with_name(f"{path.name}.corrupt")
    path.replace(aside)
    return f"{path.name} was set aside as {aside.name} and its training started again from step 0: {why}"
