"""Loss by dose: means of bins with simultaneous intervals, rates of collapse, and the doses of given losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import isotonic_regression

from harness.records.stats import LEVEL, MIN_CLUSTERS, MIN_RESAMPLED, Floats, Rate, mean_interval, percentiles, rate
from harness.studies.dose.points import Point

EDGES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)
"""Edges of the bins of the dose: two for each power of ten."""
LOSSES = (0.05, 0.1, 0.2)
"""Losses of accuracy whose dose is told."""
DRAWS = 500


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Runs of one correction in one range of the dose."""

    correction: str
    low: float
    high: float
    num_runs: int
    num_bases: int
    dose: float
    """Median."""
    loss: float
    """Mean over the runs that did not collapse; NaN where all did."""
    loss_low: float
    """Simultaneous with every other bin that has an interval; NaN below MIN_CLUSTERS bases."""
    loss_high: float
    collapsed: Rate

    @property
    def name(self) -> str:
        """The range in words."""
        return f"{self.low:g} to {self.high:g}" if math.isfinite(self.high) else f"from {self.low:g}"


def bins(points: Sequence[Point]) -> list[Bin]:
    """The bins of all corrections, in their order, intervals simultaneous over all of them (Bonferroni)."""
    groups = {
        (name, low, high): inside
        for name in dict.fromkeys(p.correction for p in points)
        for low, high in pairwise(EDGES)
        if (inside := [p for p in points if p.correction == name and low <= p.dose < high])
    }
    alive = {key: [p for p in inside if not p.has_collapsed] for key, inside in groups.items()}
    num = sum(len({p.base for p in inside}) >= MIN_CLUSTERS for inside in alive.values())
    found: list[Bin] = []
    for key, inside in groups.items():
        losses = np.array([p.loss for p in alive[key]])
        low, high = mean_interval(losses, [p.base for p in alive[key]], 1 - (1 - LEVEL) / max(num, 1))
        found.append(
            Bin(
                correction=key[0], low=key[1], high=key[2], num_runs=len(inside),
                num_bases=len({p.base for p in inside}), dose=float(np.median([p.dose for p in inside])),
                loss=float(losses.mean()) if len(losses) else math.nan, loss_low=low, loss_high=high,
                collapsed=rate(sum(p.has_collapsed for p in inside), len(inside)),
            )
        )  # fmt: skip
    return found


def fitted(doses: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """Never-falling least-squares curve: doses in order, [N], and its values there, [N]. Ties share their mean."""
    levels, place, count = np.unique(doses, return_inverse=True, return_counts=True)
    means = np.bincount(place, losses) / count
    return levels, isotonic_regression(means, weights=count.astype(np.float64)).x


def predicted(curve: tuple[Floats, Floats], doses: Floats) -> Floats:
    """Values of a fitted curve at other doses, [N]: straight between its points in the logarithm of the dose, its ends
    beyond them."""
    x, y = curve
    return np.interp(np.log(np.maximum(doses, 1e-12)), np.log(np.maximum(x, 1e-12)), y)


def explained(values: Floats, left: Floats) -> float:
    """Share of the variance of [N] values that is gone from what is left of them, [N]; NaN where all are equal."""
    spread = float(((values - values.mean()) ** 2).sum())
    return 1 - float((left**2).sum()) / spread if np.ptp(values) else math.nan


def dose_of(curve: tuple[Floats, Floats], loss: float) -> float:
    """The smallest dose at which the curve reaches a loss; infinite where it never does."""
    reached = np.flatnonzero(curve[1] >= loss)
    return float(curve[0][reached[0]]) if len(reached) else math.inf


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Dose at which the mean loss of one correction reaches a value, with the 95 % interval over resampled bases; NaN
    below MIN_RESAMPLED bases with runs that did not collapse."""

    correction: str
    loss: float
    dose: float
    low: float
    high: float
    ratio: float
    """Its dose over that of no correction, on the same draws of bases."""
    ratio_low: float
    ratio_high: float


def reached(points: Sequence[Point], corrections: Sequence[str], reference: str) -> list[Reached]:
    """The doses of LOSSES for every correction, and how far it moves the curve of `reference`."""
    rng = np.random.default_rng(0)
    bases = list(dict.fromkeys(p.base for p in points))
    draws = [np.arange(len(bases)), *(rng.integers(len(bases), size=len(bases)) for _ in range(DRAWS))]
    table = {name: np.array([_doses(points, name, bases, draw) for draw in draws]) for name in corrections}
    for name in corrections:
        if len({p.base for p in points if p.correction == name and not p.has_collapsed}) < MIN_RESAMPLED:
            table[name][1:] = math.nan
    found: list[Reached] = []
    for name in corrections:
        for k, loss in enumerate(LOSSES):
            own, other = table[name][:, k], table[reference][:, k]
            with np.errstate(invalid="ignore"):
                ratio = own / other
            low, high = percentiles(own[1:])
            ratio_low, ratio_high = percentiles(ratio[1:])
            found.append(
                Reached(
                    correction=name, loss=loss, dose=float(own[0]), low=low, high=high, ratio=float(ratio[0]),
                    ratio_low=ratio_low, ratio_high=ratio_high,
                )
            )  # fmt: skip
    return found


def _doses(points: Sequence[Point], name: str, bases: Sequence[str], draw: np.ndarray) -> list[float]:
    counts = dict(zip(bases, np.bincount(draw, minlength=len(bases)), strict=True))
    inside = [p for p in points if p.correction == name and not p.has_collapsed and counts[p.base]]
    if not inside:
        return [math.nan] * len(LOSSES)
    times = [counts[p.base] for p in inside]
    curve = fitted(np.repeat([p.dose for p in inside], times), np.repeat([p.loss for p in inside], times))
    return [dose_of(curve, loss) for loss in LOSSES]
