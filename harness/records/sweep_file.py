"""What a report reads of a sweep's YAML file: its question, and which methods the others are compared with.

`harness.sweep.planning.Sweep` is the whole file; a report needs no cells, and results may have no file at all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from harness.config.load import parse, read_yaml

SWEEPS = Path("sweeps")
CONTROL = "bf16"
BASELINES = ("flashrl", "naive")
"""Where a sweep's file names none: a plain correction, and none at all."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One comparison of arms whose outcome was known before the sweep ran."""

    text: str
    score: str
    """Column of the leaderboard."""
    low: str
    """The arm that scores lower: method, precision and, where it has one, variant ("naive int4 bypass_ppo")."""
    high: str
    is_close: bool = False
    """The two are nearly equal instead."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a sweep is for; fields are those of `harness.sweep.planning.Sweep`."""

    question: str = ""
    control: str = CONTROL
    baselines: tuple[str, ...] = BASELINES
    expectations: tuple[Expectation, ...] = ()


def purpose(sweep: str, folder: Path = SWEEPS) -> Purpose:
    """The purpose of a sweep by its file; the defaults where there is no file. Raises ValueError for a wrong value."""
    path = folder / f"{sweep}.yaml"
    values = read_yaml(path) if path.is_file() else {}
    own = {field.name: values[field.name] for field in fields(Purpose) if field.name in values}
    try:
        return parse(Purpose, own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
