"""Moderated variances: arms of one setting lend each other what few seeds cannot tell about their spread.

Three seeds give a variance with two degrees of freedom, and Student's t pays for it with a factor of 4.3. Smyth's
empirical Bayes (Stat. Appl. Genet. Mol. Biol. 3, 2004; limma) takes the true variances of the arms as draws from a
scaled inverse chi-square with `df` and `variance`, estimates both from all arms, and shrinks every arm towards them.
Two changes keep it honest here. All differences contain one control, so their variances are correlated: what the arms
together can know about their common level is bounded by `limit`. And an arm whose variance is large for the prior keeps
its own: shrinking it would call noise an effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special
from scipy import stats as distributions

from harness.records.stats.intervals import Floats

CORRELATION = 0.7
"""Correlation of two arms' differences: 0.5 where arm and control vary alike, more where the control varies more."""
MIN_ARMS = 4
"""Fewer variances tell too little about their spread: no prior."""
OUTLIER_P = 0.1
"""A variance that is too large for the prior by an F test at this level keeps its value and degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The distribution of the arms' variances; `df` 0 where it cannot be estimated."""

    df: float
    """Infinite where the arms' variances differ by no more than chance."""
    variance: float
    limit: float
    """Largest degrees of freedom that a posterior variance may have."""


def fit_prior(variances: Floats, df: Floats, correlation: float = CORRELATION) -> Prior:
    """The prior of the variances [G] with degrees of freedom [G], by the method of moments on log variances.

    Smyth's equations for the mean and the variance of log s^2; `correlation` is that of any two differences, so two
    sample variances correlate by its square, and log variances spread by that much less than independent ones do.
    """
    known = df > 0
    variances, df = variances[known], df[known]
    if len(variances) < MIN_ARMS or not variances.any():
        return Prior(df=0.0, variance=0.0, limit=0.0)
    floored = np.maximum(variances, 1e-4 * np.median(variances[variances > 0]))  # a variance of 0 has no logarithm
    logs = np.log(floored) - special.digamma(df / 2) + np.log(df / 2)
    shared = correlation**2
    size = len(df)
    excess = float(logs.var(ddof=1) - (1 - shared) * special.polygamma(1, df / 2).mean())
    limit = float(df.sum() / (1 + (size - 1) * shared))
    if excess <= 0:
        return Prior(df=math.inf, variance=float(np.exp(logs.mean())), limit=limit)
    prior_df = 2 * inverse_trigamma(excess)
    center = logs.mean() + special.digamma(prior_df / 2) - math.log(prior_df / 2)
    return Prior(df=prior_df, variance=float(np.exp(center)), limit=limit)


def moderated(variances: Floats, df: Floats, prior: Prior) -> tuple[Floats, Floats]:
    """(posterior variances [G], their degrees of freedom [G]); an arm with df 0 stays as it is."""
    if prior.df == 0:
        return variances, df
    if math.isinf(prior.df):
        pooled, total = np.full_like(variances, prior.variance), np.full_like(df, prior.limit)
    else:
        pooled = (prior.df * prior.variance + df * variances) / (prior.df + df)
        total = np.minimum(prior.df + df, prior.limit)
    tail = distributions.f.sf(variances / prior.variance, np.maximum(df, 1), min(prior.df, 1e6))
    own = (df <= 0) | (tail < OUTLIER_P) | (total <= df)
    return np.where(own, variances, pooled), np.where(own, df, total)


def inverse_trigamma(value: float) -> float:
    """The y > 0 with trigamma(y) == value > 0; it lies between 1 / value and 1 / value + 0.5."""
    found: Any = optimize.brentq(lambda y: special.polygamma(1, y) - value, 0.5 / value, 2 / value + 0.5)
    return float(found)
