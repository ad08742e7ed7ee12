"""The results behind a figure: arms of a sweep by name, and one number per seed of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

from harness.records.arms import Arm, group_arms, scored
from harness.records.folder import Series, all_sweeps, load_series, place_of, read_place
from harness.records.packed import read_packed_series
from harness.records.run_result import Pair, RunResult, accuracies
from harness.report.scores import score_arm


@dataclass(frozen=True, kw_only=True)
class Found:
    """A sweep's results: files of their own in a folder, or one packed file, which is read as it is."""

    sweep: str
    place: Path
    arms: tuple[Arm, ...]


class OfSweep(Protocol):
    """A panel of a figure: it shows arms of one sweep."""

    @property
    def sweep(self) -> str: ...


Panel = TypeVar("Panel", bound=OfSweep)
Shown = TypeVar("Shown", bound=Sized)


def load(results: Path, sweep: str) -> Found:
    """The arms of a sweep. Raises ValueError without a result, or for a damaged file."""
    place = place_of(results, sweep)
    files = [place] if place.is_file() else sorted(place.glob("*.json"))
    arms = _arms(place, tuple((path.name, path.stat().st_mtime_ns) for path in files))
    if not arms:
        raise ValueError(f"sweep {sweep!r} has no results in {results}")
    return Found(sweep=sweep, place=place, arms=arms)


def in_panels(results: Path, panels: Mapping[str, Panel], read: Callable[[Found, Panel], Shown]) -> dict[str, Shown]:
    """Panel -> what `read` finds in its sweep. A panel whose sweep has no results, or nothing that `read` finds, is
    left out. Raises ValueError without results of the first panel's sweep, and where every panel is left out."""
    first = load(results, next(iter(panels.values())).sweep)
    there = all_sweeps(results)
    found: dict[str, Shown] = {}
    for name, panel in panels.items():
        if panel.sweep in there and (shown := read(load(results, panel.sweep), panel)):
            found[name] = shown
    if not found:
        raise ValueError(_nothing_in(first))
    return found


@cache
def _arms(place: Path, files: tuple[tuple[str, int], ...]) -> tuple[Arm, ...]:
    """Several figures read one sweep; `files` tells when it changed."""
    return tuple(group_arms(read_place(place)))


def arm(found: Found, method: str, precision: str | None = None, **fields: Any) -> Arm | None:
    """The arm with this method, precision and config values (`task__n=8` for task.n); None where there is none.

    Of several the one with the usual setting, which has no variant.
    """
    chosen = arms(found, method, precision, **fields)
    return min(chosen, key=lambda arm: len(arm.variant), default=None)


def arms(found: Found, method: str, precision: str | None = None, **fields: Any) -> list[Arm]:
    """All arms with this method, precision and config values."""
    wanted = {name.replace("__", "."): value for name, value in fields.items()}
    return [
        arm
        for arm in found.arms
        if arm.method == method
        and precision in (None, arm.precision)
        and all(arm.fields.get(name) == value for name, value in wanted.items())
    ]


def known(found: Found, *chosen: Arm | None) -> list[Arm]:
    """The arms among `chosen` that have scored runs. Raises ValueError where none has."""
    there = [arm for arm in chosen if arm is not None and scored(arm)]
    if not there:
        raise ValueError(_nothing_in(found))
    return there


def _nothing_in(found: Found) -> str:
    return f"sweep {found.sweep!r} has no scored run of the arms that this figure shows"


def auc(arm: Arm) -> dict[Pair, float]:
    """Mean reference accuracy of the evaluations after step 0, by seed; a diverged run scores 0 from there on."""
    return {(base, seed): value for ((base, _), seed), value in score_arm(arm).auc.items()}


def value_of(arm: Arm, read: Callable[[RunResult], float | None]) -> dict[Pair, float]:
    """A number of every scored run that has it."""
    found = {run.pair: read(run) for run in scored(arm)}
    return {pair: value for pair, value in found.items() if value is not None and math.isfinite(value)}


def summary(arm: Arm, name: str) -> dict[Pair, float]:
    """An entry of the runs' summaries."""
    return value_of(arm, lambda run: run.summary.get(name))


def accuracy_at(arm: Arm, site: str, last: bool) -> dict[Pair, float]:
    """Accuracy at the last evaluation, or at step 0; a diverged run ends at 0."""

    def read(run: RunResult) -> float | None:
        if last and run.status == "diverged":
            return 0.0
        curve = accuracies(run.evals, site)
        return curve[-1 if last else 0][1] if curve else None

    return value_of(arm, read)


def series(found: Found, chosen: Sequence[Arm]) -> Series:
    """The per-step series of some arms; of a packed sweep without profiles."""
    runs = [run for arm in chosen for run in scored(arm)]
    if found.place.is_dir():
        return load_series(found.place, runs)
    known = read_packed_series(found.place, runs={run.run_id for run in runs})
    return {
        run: {name: values for name, values in columns.items() if not all(map(math.isnan, values))}
        for run, columns in known.items()
    }


def over_steps(
    arm: Arm, rows: Series, column: str, part: slice = slice(None), reduce: Callable[[list[float]], float] = fmean
) -> dict[Pair, float]:
    """A reduction of a column's finite values in a part of the steps, by seed; empty where the column is missing."""

    def read(run: RunResult) -> float | None:
        values = [float(value) for value in rows.get(run.run_id, {}).get(column, [])[part]]
        finite = [value for value in values if math.isfinite(value)]
        return reduce(finite) if finite else None

    return value_of(arm, read)
