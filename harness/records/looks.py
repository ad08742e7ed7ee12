"""Record of a sweep that ran until its arms were decided: its rule, every look, and why it stopped.

`results/looks/<sweep>.json`. A sweep with such a record was looked at while it ran, so every table of it is judged at
the level of a look (`level_of`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from harness.config.validation import in_words
from harness.foundation.whole_file import write_atomic
from harness.records.paths import looks_path
from harness.records.run_result import Measured, Strict
from harness.records.stats.decisions import ALPHA
from harness.records.stats.looks import level_per_look
from harness.records.sweep_file import Until, purpose


class LookRow(Strict):
    """One arm at one look."""

    arm: str
    seeds: int
    """Finished runs."""
    difference: Measured = None
    """Arm minus control at the endpoint that ranks the arm, with the interval that decides."""
    low: Measured = None
    high: Measured = None
    verdict: str
    next: str
    """Words on what follows."""


class Looks(Strict):
    """A sweep's looks."""

    sweep: str
    until: Until
    """The rule, as the sweep's file has it."""
    level: float
    """Level of the step-up over arms at every look; over all looks it is `stats.ALPHA`."""
    looks: tuple[tuple[LookRow, ...], ...] = ()
    stopped: str | None = None
    """Reason why the sweep ended; null while it runs, or where it was interrupted."""


def read_looks(results: Path, sweep: str) -> Looks | None:
    """The looks at a sweep; None where it did not run until decided. Raises ValueError for a file that is no record."""
    path = looks_path(results, sweep)
    if not path.is_file():
        return None
    try:
        return Looks.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: no record of looks: {in_words(error)}") from None


def write_looks(results: Path, looks: Looks) -> None:
    """Write the record, atomically."""
    write_atomic(looks_path(results, looks.sweep), (looks.model_dump_json(indent=1) + "\n").encode())


def look_level(until: Until) -> float:
    """Level of one look under a rule."""
    return level_per_look(until.sizes, ALPHA)


def level_of(results: Path, sweep: str, alpha: float = ALPHA) -> float:
    """Level at which a sweep is judged, `alpha` over all looks: that of one look where it was looked at while it ran,
    by a rule of its own or, as the `looks` of its file say, by people who then added runs."""
    found = read_looks(results, sweep)
    if found is not None:
        return found.level * alpha / ALPHA  # the share that a look has of the whole hardly depends on the whole
    looks = purpose(sweep, results).looks
    return level_per_look(looks, alpha) if looks else alpha
