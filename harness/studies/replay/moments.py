"""Bias, variance and cosine of a gradient estimator from few independent batches, without the noise of either mean.

    q_b   gradient of one training batch, b = 1..S, under the rule and the sampler in question         [S, D]
    r_b   the same prompts from the exact sampler; r_1..r_S are paired with q, R >= S      [R, D]
    d_b = q_b - r_b;  bias = E d,  target = E r,  both estimated by products of *different* batches (U-statistics)

The naive |mean d|^2 exceeds |bias|^2 by tr Cov(d) / S, the noise of the mean; sum_{b != c} <d_b, d_c> / S(S - 1) does
not. Pairing removes what q and r share (prompts, random numbers), so that small biases show. Batches are the unit of
resampling: their prompts are disjoint and rules may use statistics of a batch, so nothing smaller is independent.

Intervals: a wild bootstrap with random signs, which is valid for U-statistics that degenerate at bias 0 (Dehling and
Mikosch, J. Multivariate Anal. 51, 1994), where resampling batches with replacement is not; stretched to Student's t.
The noise of the target is in them. Simulated coverage of 95 % intervals from 12 batches on: bias 92 to 99 %, gain 93 to
97 %, cosine 88 to 99 %. Everything works on Gram matrices in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import stdtrit

from harness.records.stats import LEVEL, Floats

DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The target gradient and how well R batches know it."""

    num_batches: int
    norm: float
    """|E r|, debiased."""
    norm_error: float
    """Relative standard error of `norm`, by the jackknife."""
    variance: float
    """tr Cov of one batch over |E r|^2."""
    half_distance: float
    """|mean of the first half - mean of the second| / |E r|: what two estimates of one gradient differ by."""
    half_cosine: float
    """Cosine of the two halves' means."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """An estimator against the target; lengths in units of |E r|, squares in units of |E r|^2."""

    bias: Interval
    """|E q - E r|, debiased; 0 where the debiased square is negative."""
    bias_raw: float
    """|mean d|, noise included."""
    bias_floor: float
    """Value that `bias` stays below in 95 % of cases where there is no bias."""
    p_zero: float
    """P of so large a debiased square under random signs of d: no bias. Exact where q and r are exchangeable."""
    gain: Interval
    """<E q, E r> / |E r|^2: the share of the target's step that is taken along it."""
    cosine: Interval
    """Cosine of E q and E r, debiased."""
    cosine_raw: float
    """Cosine of the means of the S pairs."""
    variance: float
    """tr Cov(q_b) of one batch."""
    variance_ratio: float
    """tr Cov(q_b) / tr Cov(r_b)."""
    norm: float
    """Mean |q_b| of one batch."""
    mse: float
    """bias^2 + variance of one batch: the error of one training step."""
    mse_mean: float
    """bias^2 + variance / S: the error of the mean of the S batches."""


def off_diagonal(gram: Floats) -> float:
    """Mean of the entries off the diagonal: unbiased for |E x|^2, or <E x, E y> where rows and columns are paired."""
    size = len(gram)
    return float((gram.sum() - np.trace(gram)) / (size * (size - 1)))


def spread(gram: Floats) -> float:
    """tr Cov of one row, with S - 1 degrees of freedom."""
    size = len(gram)
    return float((np.trace(gram) - gram.sum() / size) / (size - 1))


def reference(gram: Floats) -> Reference:
    """The target from the Gram matrix [R, R] of the exact sampler's batches, R >= 4."""
    size = len(gram)
    square = max(off_diagonal(gram), 0.0)
    left_out = [off_diagonal(np.delete(np.delete(gram, b, 0), b, 1)) for b in range(size)]
    error = math.sqrt((size - 1) ** 2 / size * float(np.var(left_out, ddof=1)))
    half = size // 2
    first, second, across = gram[:half, :half].mean(), gram[half:, half:].mean(), gram[:half, half:].mean()
    return Reference(
        num_batches=size,
        norm=math.sqrt(square),
        norm_error=_over(error, 2 * square),
        variance=_over(spread(gram), square),
        half_distance=math.sqrt(_over(first + second - 2 * across, square)),
        half_cosine=_over(float(across), math.sqrt(first * second)),
    )


def compare(q: Floats, r: Floats, r_gram: Floats, rng: np.random.Generator, draws: int = DRAWS) -> Moments:
    """Bias, variance and cosine of S batches q [S, D] against r [R, D], whose first S rows are paired with q. float64.

    `r_gram` [R, R] is r @ r.T, which many estimators share. Raises ValueError where r does not tell its mean from 0.
    """
    d, size, target = q - r[: len(q)], len(q), off_diagonal(r_gram)
    if not target > 0:
        raise ValueError(f"reference: {len(r)} batches do not tell the gradient from 0; take more")
    dd, dr, rr = d @ d.T, d @ r.T, r_gram
    found = _Found(square=off_diagonal(dd), along=_apart(dr), target=target)
    drawn, linear, nulls = _drawn(dd, dr, rr, found, rng, draws)
    paired = rr[:size, :size]
    q_gram = dd + dr[:, :size] + dr[:, :size].T + paired
    across = (dr[:, :size] + paired).sum()
    bias, variance = max(found.square, 0.0) / target, spread(q_gram) / target
    return Moments(
        bias=_bias(found, drawn, linear, nulls),
        bias_raw=math.sqrt(dd.mean() / target),
        bias_floor=math.sqrt(max(float(np.quantile(nulls, LEVEL)), 0.0) / target),
        p_zero=_p_zero(dd, rng, draws),
        gain=_interval(1 + found.along / target, 1 + drawn.along / drawn.target),
        cosine=_interval(_cosine(found), _cosine(drawn)),
        cosine_raw=_over(float(across), math.sqrt(max(float(q_gram.sum() * paired.sum()), 0.0))),
        variance=variance,
        variance_ratio=_over(spread(q_gram), spread(paired)),
        norm=float(np.sqrt(np.maximum(np.diag(q_gram), 0.0)).mean()),
        mse=bias + variance,
        mse_mean=bias + variance / size,
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """|bias|^2, <bias, target> and |target|^2: estimates, or draws of what the true values may be."""

    square: Any
    along: Any
    target: Any


def _apart(cross: Floats) -> float:
    """Mean of <d_b, r_c> over b != c, [S, R]: the noise that a pair shares stays out."""
    size, width = cross.shape
    return float((cross.sum() - np.trace(cross[:, :size])) / (size * (width - 1)))


def _drawn(
    dd: Floats, dr: Floats, rr: Floats, found: _Found, rng: np.random.Generator, draws: int
) -> tuple[_Found, Floats, Floats]:
    """(estimates minus their simulated errors; of |bias|^2 the error per unit of bias, and at bias 0), one per draw.

    A sign per batch turns centred batches into errors e of both means. With the bias and the target as the means
    shrunk to their debiased lengths, the error of |bias|^2 is 2 <bias, e_d> + U(d, d), of <bias, target> it is
    <bias, e_r> + <target, e_d> + U(d, r), and of |target|^2 it is 2 <target, e_r> + U(r, r).
    """
    size, width = dr.shape
    signs = rng.choice((-1.0, 1.0), size=(draws, width))
    s_r, s_d = signs * _stretch(width), signs[:, :size] * _stretch(size)
    length = max(math.sqrt(dd.mean()), 1e-150)
    shrink_d = math.sqrt(max(found.square, 0.0)) / length
    shrink_r = math.sqrt(found.target / rr.mean())
    centred_dd, centred_dr, centred_rr = _centred(dd), _centred(dr), _centred(rr)
    u_dd = (_quadratic(s_d, centred_dd, s_d) - np.trace(centred_dd) * _stretch(size) ** 2) / (size * (size - 1))
    u_rr = (_quadratic(s_r, centred_rr, s_r) - np.trace(centred_rr) * _stretch(width) ** 2) / (width * (width - 1))
    own = np.trace(centred_dr[:, :size]) * _stretch(size) * _stretch(width)
    u_dr = (_quadratic(s_d, centred_dr, s_r) - own) / (size * (width - 1))
    bias_on_d, bias_on_r = s_d @ (dd.mean(1) - dd.mean()) / size, s_r @ (dr.mean(0) - dr.mean()) / width
    target_on_d, target_on_r = s_d @ (dr.mean(1) - dr.mean()) / size, s_r @ (rr.mean(1) - rr.mean()) / width
    drawn = _Found(
        square=found.square - 2 * shrink_d * bias_on_d - u_dd,
        along=found.along - shrink_d * bias_on_r - shrink_r * target_on_d - u_dr,
        target=np.maximum(found.target - 2 * shrink_r * target_on_r - u_rr, 1e-3 * found.target),
    )
    return drawn, 2 * bias_on_d / length, u_dd


@lru_cache
def _stretch(size: int) -> float:
    """From random signs of centred batches to Student's t of their mean."""
    ratio = float(stdtrit(size - 1, 0.5 + LEVEL / 2)) / NormalDist().inv_cdf(0.5 + LEVEL / 2)
    return ratio * math.sqrt(size / (size - 1))


def _centred(gram: Floats) -> Floats:
    return gram - gram.mean(1, keepdims=True) - gram.mean(0, keepdims=True) + gram.mean()


def _quadratic(left: Floats, gram: Floats, right: Floats) -> Floats:
    return ((left @ gram) * right).sum(1)


def _bias(found: _Found, drawn: _Found, linear: Floats, nulls: Floats) -> Interval:
    """|bias| / |target| by inverting the test: a length L is inside where the estimate is no rare outcome of it.

    With L in units of the target, estimates are L^2 t + L sqrt(t) linear + nulls, t drawn.
    """
    root, tail = np.sqrt(drawn.target), 0.5 - LEVEL / 2
    value = math.sqrt(max(found.square, 0.0) / found.target)

    def share_above(length: float) -> float:
        return float(np.mean(length**2 * drawn.target + length * root * linear + nulls >= found.square))

    def crossing(level: float) -> float:
        """The length at which the share of outcomes above the estimate reaches `level`."""
        low, high = 0.0, 1.0
        while share_above(high) < level and high < 1e6:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if share_above(middle) < level else (low, middle)
        return high if low else 0.0

    lower = 0.0 if share_above(0.0) >= tail else crossing(tail)
    return Interval(value=value, low=min(lower, value), high=max(crossing(1 - tail), value))


def _cosine(x: _Found) -> Any:
    """<t + b, t> / (|t + b| |t|), at most 1 where noise has the square of b below its part along t."""
    ahead = 1 + x.along / x.target
    across = np.maximum(x.square / x.target - (x.along / x.target) ** 2, 0.0)
    return ahead / np.sqrt(np.maximum(ahead**2 + across, 1e-300))


def _interval(value: Any, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return Interval(value=float(value), low=float(low), high=float(high))


def _p_zero(gram: Floats, rng: np.random.Generator, draws: int) -> float:
    signs = rng.choice((-1.0, 1.0), size=(draws, len(gram)))
    return float((1 + np.sum(_quadratic(signs, gram, signs) >= gram.sum() * (1 - 1e-12))) / (1 + draws))


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan
