"""Curves of an arm over its bases with a band over its runs, as plain arrays for figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.records.arms import Arm, scored
from harness.records.folder import Series
from harness.records.run_result import Base, accuracies
from harness.records.running_mean import running_mean
from harness.records.stats import Floats


@dataclass(frozen=True, kw_only=True)
class Band:
    """A curve over seeds. All [N] float64; NaN where no seed has a value."""

    x: Floats
    middle: Floats
    """Mean or median over the bases, each base being the mean of its runs, as in the leaderboard."""
    low: Floats
    """The lowest seed."""
    high: Floats
    ends: tuple[tuple[float, float], ...] = ()
    """(x, y) of the last value of every run that diverged."""


def over_steps(
    arm: Arm, series: Series, column: str, center: Literal["mean", "median"] = "mean", window: int = 1
) -> Band:
    """A scalar column over the policy steps, counted from 1; every seed is its running mean over `window` steps."""
    rows, bases = list[Floats](), list[Base]()
    ends: list[tuple[float, float]] = []
    for run in scored(arm):
        if column not in series.get(run.run_id, {}):
            continue
        bases.append(run.base)
        values = np.asarray(series[run.run_id][column], dtype=np.float64)
        values = running_mean(values, window)
        rows.append(values)
        known = np.flatnonzero(np.isfinite(values))
        if run.status == "diverged" and len(known):
            ends.append((float(known[-1] + 1), float(values[known[-1]])))
    width = max(map(len, rows), default=0)
    padded = np.array([np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows]).reshape(
        len(rows), width
    )
    return _band(np.arange(1, width + 1, dtype=np.float64), padded, bases, center, tuple(ends))


def over_evaluations(arm: Arm, site: Literal["reference", "rollout"]) -> Band:
    """Accuracy at every evaluation, step 0 included."""
    runs = [dict(accuracies(run.evals, site)) for run in scored(arm)]
    steps = sorted({step for run in runs for step in run})
    values = np.array([[run.get(step, np.nan) for step in steps] for run in runs]).reshape(len(runs), len(steps))
    last = [
        (float(max(run)), run[max(run)])
        for run, result in zip(runs, scored(arm), strict=True)
        if run and result.status == "diverged"
    ]
    bases = [run.base for run in scored(arm)]
    return _band(np.array(steps, dtype=np.float64), values, bases, "mean", tuple(last))


def over_profile(arm: Arm, series: Series, group: str, axis: str, column: str) -> Band:
    """A profile such as `by_position/k3` against `by_position/position`, over steps weighted by its token counts."""
    curves: list[dict[float, float]] = []
    for run in scored(arm):
        columns = series.get(run.run_id, {})
        sums: dict[float, list[float]] = {}
        for x, values, counts in zip(
            *(columns.get(f"{group}/{name}", ()) for name in (axis, column, "count")), strict=True
        ):
            for place, value, count in zip(x, values, counts, strict=True):
                if count and np.isfinite(value):
                    total = sums.setdefault(place, [0.0, 0.0])
                    total[0], total[1] = total[0] + value * count, total[1] + count
        curves.append({place: total / count for place, (total, count) in sums.items()})
    places = sorted({place for curve in curves for place in curve})
    values = np.array([[curve.get(place, np.nan) for place in places] for curve in curves]).reshape(
        len(curves), len(places)
    )
    bases = [run.base for run in scored(arm)]
    return _band(np.array(places, dtype=np.float64), values, bases, "median", ())


def _band(x: Floats, values: Floats, bases: Sequence[Base], center: str, ends: tuple[tuple[float, float], ...]) -> Band:
    """Band of `values` [runs, N]; `bases`: the base of each run."""
    if not values.size:
        empty = np.array([], dtype=np.float64)
        return Band(x=empty, middle=empty, low=empty, high=empty)
    means = np.array([_quiet(np.nanmean, values[[other == base for other in bases]]) for base in dict.fromkeys(bases)])
    middle = _quiet(np.nanmean if center == "mean" else np.nanmedian, means)
    return Band(x=x, middle=middle, low=_quiet(np.nanmin, values), high=_quiet(np.nanmax, values), ends=ends)


def _quiet(reduce: Callable[..., Floats], values: Floats) -> Floats:
    """`reduce` over the rows, without numpy's warning about steps that no seed has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(values, axis=0)
