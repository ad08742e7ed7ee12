"""Frame of all benches: parsing their options, refusing bad input, writing JSON, tables of rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic

_PACKAGE = "harness.devtools.bench"
PROGRAM = f"python -m {_PACKAGE}"


def run(name: str, words: Sequence[str]) -> int:
    """Parse the words of one bench and run it: its exit code, or 2 with one line on standard error for bad input."""
    given = parsed(name, words)
    try:
        return import_module(f"{_PACKAGE}.{name}").command(given)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


def parsed(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The options of one bench, whose help begins with the first line of its docstring."""
    bench = import_module(f"{_PACKAGE}.{name}")
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=(bench.__doc__ or "").splitlines()[0])
    bench.options(parser)
    return parser.parse_args(words)


def add_device_and_out(parser: argparse.ArgumentParser, *, needs_out: bool = False) -> None:
    """The options that most benches have."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--out", type=Path, required=needs_out, help="JSON file of everything that was measured")


def add_numbers(parser: argparse.ArgumentParser, *numbers: tuple[str, int, str]) -> None:
    """Options that are whole numbers: (name, default, meaning) of each."""
    for name, value, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")


def word_list(text: str) -> list[str]:
    """Words separated by commas."""
    return text.split(",")


def number_list(text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    if not all(word.isdecimal() and int(word) for word in word_list(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0 are expected, separated by commas")
    return [int(word) for word in word_list(text)]


def check_device(device: str) -> None:
    """Raises ValueError, one line, where torch does not see the device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is visible; valid: --device cpu")


def check_positive(given: argparse.Namespace, *names: str) -> None:
    """Raises ValueError, one line, for an option below 1."""
    for name in names:
        if getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: {getattr(given, name)}; valid: >= 1")


def check_gpu_memory(given: argparse.Namespace) -> None:
    """Raises ValueError, one line, for a share of a GPU that vLLM cannot be given."""
    if not 0 < given.gpu_memory < 1:
        raise ValueError(f"--gpu-memory: {given.gpu_memory:g}; valid: above 0, below 1")


def reason(error: Exception) -> str:
    """An error in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def save(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write everything that was found so far as JSON, whole; nothing without a path."""
    if path is not None:
        write_atomic(path, json.dumps(found, indent=1, allow_nan=False).encode() + b"\n")


def settings_of(given: argparse.Namespace, names: Sequence[str], later: Mapping[str, object]) -> dict[str, Any]:
    """The options that a file of cells was measured with, by name. Those of `later` (name -> usual value) came after
    the first files: they are in only where they are not as usual, so that older files still count."""
    return {name: getattr(given, name) for name in names} | {
        name: getattr(given, name) for name, usual in later.items() if getattr(given, name) != usual
    }


def read_found(path: Path) -> dict[str, Any]:
    """Findings that a bench wrote before. Raises ValueError naming a file that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file of a bench: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON file of a bench: it holds no object")
    return found


def kept(path: Path, name: str, **head: object) -> dict[str, Any]:
    """Cells or runs, as `name` says, that an earlier call left in the file, where all of `head` is the same there.

    Where it is not, a line on standard error says so: the file is written anew. Raises ValueError as `read_found` does.
    """
    old = read_found(path) if path.exists() else {}
    if not old or not (other := [key for key, value in head.items() if old.get(key) != value]):
        return old.get(name, {})
    print(f"{path}: {', '.join(other)}: not as in this call; nothing of the file is kept", file=sys.stderr)
    return {}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text in columns; a column that is empty throughout is left out."""
    names = list(dict.fromkeys(name for row in rows for name in row if row[name] is not None))
    return text_table(names, [[_text(row.get(name)) for name in names] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
