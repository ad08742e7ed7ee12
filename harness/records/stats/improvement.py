"""Probability of improvement: how often a run of one arm beats a run of another, over one or several settings.

The definition is that of rliable (arXiv 2108.13264, section 4.3): in every stratum (a length, a model size) the share
of pairs of runs, one of each arm, that the first wins, ties counted half; then the mean over strata. Left out:
rliable's percentile bootstrap, which is too narrow with 3 to 5 runs (`harness.devtools.bench.coverage` shows it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from harness.records.stats.intervals import LEVEL, Floats


class Stratum(NamedTuple):
    """One setting in which an arm and its control ran."""

    arm: Floats
    """Scores [m] of the runs of the arm."""
    control: Floats
    """Scores [n] of the runs of the control."""
    num_bases: int = 1
    """Bases that both ran on. Of several the bases are the units, of one its runs."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """P(arm > control) with its interval; NaN without a stratum that has runs of both."""

    probability: float
    low: float
    high: float


def improvement(strata: Sequence[Stratum]) -> Improvement:
    """P(arm > control), with the score interval of Newcombe's method 5 (Statistics in Medicine 25, 2006).

    Runs of one base rise and fall together, so an interval by runs held the truth in 59 to 93 % where bases had two to
    six runs and an arm differed from base to base; that of one run a base holds it in 98 % and more.

    The variance at a supposed probability is Hanley and McNeil's; over K strata it is the mean of theirs over K, as if
    the probability were one. Student's t with sum(m + n - 2) degrees of freedom in place of the normal: three runs
    that all beat three others are no proof at the 5 % level, since luck alone does that once in ten (2 of 20 orders).
    One run each: [0, 1].
    """
    known = [each for each in strata if len(each.arm) and len(each.control)]
    if not known:
        return Improvement(probability=math.nan, low=math.nan, high=math.nan)
    point = float(np.mean([won(each.arm, each.control) for each in known]))
    sizes = [(n, n) if n > 1 else (len(arm), len(control)) for arm, control, n in known]
    df = sum(m + n - 2 for m, n in sizes)
    if df < 1:
        return Improvement(probability=point, low=0.0, high=1.0)
    quantile = float(stdtrit(df, 0.5 + LEVEL / 2))

    def is_inside(theta: float) -> bool:
        variance = sum(_variance(theta, m, n) for m, n in sizes) / len(sizes) ** 2
        return abs(theta - point) <= quantile * math.sqrt(variance)

    return Improvement(probability=point, low=_edge(is_inside, point, 0.0), high=_edge(is_inside, point, 1.0))


def won(arm: Floats, control: Floats) -> float:
    """Share of the pairs that the arm wins, ties half: the statistic of Mann and Whitney over m n."""
    return float(wins(arm[None], control[None])[0])


def wins(a: Floats, b: Floats) -> Floats:
    """`won` of each row: [draws, m] and [draws, n] -> [draws]."""
    return np.mean(np.sign(a[:, :, None] - b[:, None, :]) / 2 + 0.5, axis=(1, 2))


def _variance(theta: float, m: int, n: int) -> float:
    half = (m + n) / 2 - 1
    return theta * (1 - theta) * (1 + half * (1 - theta) / (2 - theta) + half * theta / (1 + theta)) / (m * n)


def _edge(is_inside: Callable[[float], bool], inside: float, outside: float) -> float:
    """End of the interval around `inside` on the way to `outside`, by bisection."""
    if inside == outside:
        return inside
    inner, outer = inside, outside
    for _ in range(60):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if is_inside(middle) else (inner, middle)
    return inner
