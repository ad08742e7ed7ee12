"""What the commands' parsers share: the types of their arguments and the options that several have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

OVERRIDES = "Hydra overrides, e.g. model=m task.n=16 algo.mode=bypass_pg knobs.TIS.cap=4.0 launch.packing=true"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    commands: Commands, name: str, words: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand whose work `run` does."""
    sub = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    sub.set_defaults(run=run)
    return sub


def places(sub: argparse.ArgumentParser) -> None:
    """The option that says where results are."""
    sub.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is expected")
    return int(text)


def minutes(text: str) -> float:
    """A finite number of minutes above 0."""
    return _above_zero(text, "minutes above 0 are expected")


def hours(text: str) -> float:
    """A finite number of hours above 0."""
    return _above_zero(text, "a number of hours above 0 is expected")


def _above_zero(text: str, wish: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: {wish}")
    return found


def word_list(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word for word in text.split(",") if word)


def number_list(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers separated by commas are expected")
    return tuple(int(part) for part in text.split(","))
