"""Two arms on the same seeds and questions: the difference over seeds alone, over both, and on the answers themselves.

Three questions, from the most to the least demanding. `crossed`: would new seeds on new questions differ? `paired`:
would new seeds on these questions? `mcnemar`: do these very runs differ by more than the luck of single answers?
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit

from harness.records.stats.intervals import LEVEL, ROUNDING, Floats, mean_squares

Key = TypeVar("Key", bound=Hashable)
MAX_EXACT = 16
"""Largest number of pairs whose 2^n sign flips are enumerated."""
MAX_DF = 400
"""Most degrees of freedom: more change a quantile by less than 0.2 %, and cost time."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm minus its control over the pairs of runs that share their seeds."""

    num_pairs: int
    mean: float
    """Mean difference; NaN without a pair."""
    sd: float
    """Sample standard deviation of the differences (ddof 1), NaN below two pairs."""
    low: float
    """NaN below two pairs and where all differences are equal, like the two below."""
    high: float
    p: float
    """Two-sided p of Student's t."""


def paired(arm: Mapping[Key, float], control: Mapping[Key, float]) -> Difference:
    """The mean difference over the common keys (base seed, seed), with a t interval."""
    keys = [key for key in arm if key in control]
    d = np.array([arm[key] - control[key] for key in keys], dtype=np.float64)
    n, nan = len(d), math.nan
    if n < 2:
        return Difference(num_pairs=n, mean=float(d[0]) if n else nan, sd=nan, low=nan, high=nan, p=nan)
    center, sd = float(d.mean()), float(d.std(ddof=1))
    low, high, p = _student(center, sd / math.sqrt(n), n - 1)
    return Difference(num_pairs=n, mean=center, sd=sd, low=low, high=high, p=p)


def _student(center: float, error: float, df: int) -> tuple[float, float, float]:
    """(low, high, two-sided p) of Student's t for a mean with its standard error; NaN for an error of 0."""
    if error <= ROUNDING:
        return math.nan, math.nan, math.nan
    half = float(stdtrit(df, 0.5 + LEVEL / 2)) * error
    return center - half, center + half, 2 * float(stdtr(df, -abs(center) / error))


def exchanges(n: int) -> np.ndarray:
    """[2^n, n] of 0 and 1: every way to exchange the two sides of some of n pairs, none first."""
    return np.arange(2**n)[:, None] >> np.arange(n) & 1


def sign_flip_p(differences: Floats) -> float:
    """Share of the 2^n sign patterns whose absolute mean is at least the observed one, never below 2^(1 - n); NaN for
    no pair and beyond `MAX_EXACT`."""
    n = len(differences)
    if not 1 <= n <= MAX_EXACT:
        return math.nan
    sums = np.abs((1 - 2 * exchanges(n)) @ differences)
    return float(np.mean(sums >= sums[0] * (1 - 1e-9)))


def sign_test_p(differences: Sequence[float]) -> float:
    """Two-sided p of the exact sign test that negative and positive differences are equally likely; 1 without any.

    Zeros are left out (Dixon and Mood, J. Am. Stat. Assoc. 41, 1946). It asks for the direction alone: a few
    differences that are far larger than the others, which widen every interval around a mean, do not matter.
    """
    return _fair_p(sum(gap < 0 for gap in differences), sum(gap > 0 for gap in differences))


def _fair_p(losses: int, wins: int) -> float:
    """Two-sided p of so many wins and losses if both are equally likely; 1 without any. scipy's is 0 below 1e-270."""
    total = losses + wins
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(min(losses, wins) + 1)) / 2**total)


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """A mean difference whose interval covers new seeds on new questions; NaN below two seeds or two questions, and
    where all differences are equal."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided p of Student's t."""
    df: int
    """Satterthwaite's degrees of freedom, rounded down, at most MAX_DF."""


def crossed(arm: Floats, control: Floats) -> Crossed:
    """Arm minus control, [S, Q] each with rows of common seeds, seeds and questions as crossed random effects.

    Two-way analysis of variance without replication: Var(mean) = (MS_seeds + max(MS_questions - MS_rest, 0)) / (S Q),
    degrees of freedom by Satterthwaite (Biometrics Bulletin 2, 1946). Where questions do not differ it is the paired t
    test over seeds; where seeds do not differ beyond answer noise it is no narrower than that test either.
    """
    d = arm - control
    size, num_questions = d.shape
    nan = math.nan
    center = float(d.mean()) if d.size else nan
    if size < 2 or num_questions < 2:
        return Crossed(mean=center, low=nan, high=nan, p=nan, df=0)
    variance, freedom = crossed_variance(d)
    df = min(MAX_DF, math.floor(freedom + 1e-9))
    low, high, p = _student(center, math.sqrt(variance), df)
    return Crossed(mean=center, low=low, high=high, p=p, df=df)


def crossed_variance(values: Floats) -> tuple[float, float]:
    """(variance of the mean of [S, Q] under crossed random effects, its degrees of freedom by Satterthwaite).

    At least 1: where two mean squares are subtracted that hardly differ, Satterthwaite's come near 0.
    """
    size, width = values.shape
    ms_rows, ms_columns, ms_rest = mean_squares(values)
    terms = [(ms_rows, size - 1)]
    if ms_columns > ms_rest:
        terms += [(ms_columns, width - 1), (-ms_rest, (size - 1) * (width - 1))]
    total = sum(value for value, _ in terms)
    spread = sum(value**2 / freedom for value, freedom in terms)
    return total / values.size, max(1.0, total**2 / spread) if spread > 0 else size - 1


@dataclass(frozen=True, kw_only=True)
class Answers:
    """McNemar's exact test on answers of 0 and 1."""

    wins: int
    """Answers that the arm alone got right, over all seeds."""
    losses: int
    p: float
    """Two-sided p over all seeds."""


def mcnemar(arm: Floats, control: Floats) -> Answers:
    """McNemar's test whether two arms answer differently: [S, Q] of 0 and 1 each, rows of common seeds.

    Exact: given the answers on which two runs disagree, wins are binomial with probability 1/2. Seeds are combined by
    adding their counts (Mantel and Haenszel for pairs). It takes the runs as given, so under noise between seeds it
    calls far more than 5 % of equal methods different: it is no verdict on a method.
    """
    wins, losses = int(np.sum(arm > control)), int(np.sum(arm < control))
    return Answers(wins=wins, losses=losses, p=_fair_p(losses, wins))
