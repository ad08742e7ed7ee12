"""Words on single bases: what an arm does on each, where the bases differ too much to decide its mean over them.

A mean over bases asks what the next base would show, and few bases that differ leave it open. What a format did to one
base is another question, and the noise of runs alone answers it: runs that share arm and base, where a setting has such
replicates, say how far two runs of one arm lie apart. Their variance is pooled over arms and bases.

The rule is that of `decisions`, for every arm on every base at once, with a margin on both sides: *lower* or *higher*
where the interval lies beyond -delta or delta, *equal* where it lies between them, else *open*. The margin on the outer
side is there because an arm's runs may be noisier than those that were replicated. A base on which a run of the arm
collapsed and none of the control's did is *collapsed*, without a test. How often the words are wrong is simulated in
`bench.base_worlds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy import stats as distributions

from harness.records.stats.decisions import ALPHA
from harness.records.stats.intervals import ROUNDING
from harness.records.stats.outcomes import Outcome, Outcomes
from harness.records.stats.replicates import by_base, pooled_variance
from harness.records.stats.verdicts import DELTA, step_up

OnBase = Literal["lower", "higher", "equal", "open", "collapsed"]
ON_BASE: tuple[OnBase, ...] = get_args(OnBase)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variance of the value of one run among runs of one arm on one base."""

    variance: float
    """NaN without replicates."""
    df: float
    """Replicates beyond the first of each arm and base; 0 where all are equal, so that the noise is not known."""


@dataclass(frozen=True, kw_only=True)
class BaseDifference:
    """An arm minus its control on one base, each by the mean of its runs there."""

    mean: float
    low: float
    high: float
    """The interval that decides; NaN where a run of the arm collapsed."""
    word: OnBase


def run_noise(arms: Iterable[Outcomes]) -> Noise:
    """The noise of runs by the replicates of these arms, runs that collapsed left out."""
    variance, df = pooled_variance(
        [run.value for run in own.values() if not run.has_collapsed] for runs in arms for own in by_base(runs).values()
    )
    return Noise(variance=variance, df=df if variance > ROUNDING**2 else 0)


def on_bases(
    pairs: Sequence[tuple[Outcomes, Outcomes]], noise: Noise, delta: float = DELTA, alpha: float = ALPHA
) -> list[dict[Any, BaseDifference]]:
    """(arm, control) pairs of one setting -> base -> difference there, over the bases that both have.

    Bases on which runs of the control collapsed are left out. Raises ValueError where the noise is not known.
    """
    if not noise.df > 0:
        raise ValueError("noise.df=0: no two runs that share arm and base differ; valid: 1 and more")
    found: list[dict[Any, BaseDifference]] = [{} for _ in pairs]
    tested: list[tuple[int, Any, float, float]] = []
    for index, (arm, control) in enumerate(pairs):
        ours, theirs = by_base(arm), by_base(control)
        for base in (base for base in ours if base in theirs):
            own, other = list(ours[base].values()), list(theirs[base].values())
            if any(run.has_collapsed for run in other):
                continue
            mean = _mean(own) - _mean(other)
            if any(run.has_collapsed for run in own):
                found[index][base] = BaseDifference(mean=mean, low=math.nan, high=math.nan, word="collapsed")
            else:
                error = math.sqrt(noise.variance * (1 / len(own) + 1 / len(other)))
                tested.append((index, base, mean, error))
    gaps = np.array([abs(mean) for _, _, mean, _ in tested]) - delta
    errors = np.array([error for *_, error in tested])
    adjusted, level = step_up(2 * distributions.t.sf(np.abs(gaps) / errors, noise.df), alpha)
    half = float(distributions.t.ppf(0.5 + level / 2, noise.df))
    for (index, base, mean, error), p in zip(tested, adjusted, strict=True):
        word: OnBase = "open"
        if p <= alpha:
            word = "equal" if abs(mean) < delta else "lower" if mean < 0 else "higher"
        found[index][base] = BaseDifference(mean=mean, low=mean - half * error, high=mean + half * error, word=word)
    return found


def _mean(runs: Sequence[Outcome]) -> float:
    return sum(run.value for run in runs) / len(runs)
