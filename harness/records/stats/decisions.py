"""Verdicts of a whole setting at once: every arm against the control, better, worse, equal, or cannot tell.

The rule. An arm's decision is whatever its interval allows: away from 0 it is better or worse, inside (-delta, delta)
it is equal. Both ask for the same interval, so "equal" (two one-sided tests) is corrected for the number of arms as
"worse" is. R arms of m are decided where the interval at level 1 - ALPHA R / m decides them, with the largest such R:
Benjamini and Hochberg's step-up, whose intervals are those of Benjamini and Yekutieli (J. Am. Stat. Assoc. 100, 2005).
ALPHA is 3.3 %: a third of the 5 % that is promised is left for what the moderated variances do not know. Of the
verdicts of a setting at most 5 % are expected to be wrong, and every printed interval covers with at least 95 %
(simulated in results/tables/stats_coverage.md). The interval is the decision, so no row can contradict itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

from harness.records.stats.intervals import LEVEL, ROUNDING, Floats
from harness.records.stats.moderation import Prior, fit_prior, moderated
from harness.records.stats.verdicts import DELTA, Verdict, step_up

ALPHA = 0.033
"""Level of the step-up over the arms of a setting."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """An arm minus its control over independent units (bases, or runs of one base)."""

    mean: float
    """NaN without a unit."""
    variance: float
    """Variance of one unit's difference; NaN below two units."""
    num_units: int
    df: float
    """Degrees of freedom of `variance`; 0 below two units."""
    can_pool: bool = True
    """False keeps the arm's own variance and leaves it out of the prior: some of its runs collapsed."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Student's t around the mean, by itself; NaN below two units."""
        if self.num_units < 2:
            return math.nan, math.nan
        half = float(distributions.t.ppf(0.5 + level / 2, self.df)) * math.sqrt(self.variance / self.num_units)
        return self.mean - half, self.mean + half


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Conclusion from a contrast beside the others of its setting."""

    verdict: Verdict
    low: float
    high: float
    """The interval that decides, NaN where the variance is not known."""
    level: float
    """Level of that interval, between 1 - ALPHA and 1."""
    p: float
    """Two-sided, of no difference; one arm alone."""
    p_equal: float
    """p of a difference of delta or more, by two one-sided tests; one arm alone."""
    p_adjusted: float
    """p of the decision, over the arms of the setting: at most ALPHA where it is taken."""
    sd: float
    """Moderated standard deviation of one unit's difference."""
    df: float


def decide(contrasts: Sequence[Contrast], alpha: float = ALPHA) -> list[Decision]:
    """The verdicts of one setting. Contrasts without a variance are no part of the family, nor are those whose
    moderated variance is 0: units that are equal by chance do not say how far others lie apart."""
    means, counts = (np.array([getattr(c, name) for c in contrasts], dtype=float) for name in ("mean", "num_units"))
    variances, df, _ = spread(contrasts)
    errors = np.sqrt(variances / np.maximum(counts, 1))
    is_known = (df > 0) & (errors > ROUNDING)
    df = np.where(is_known, df, 0.0)
    errors, freedom = np.where(is_known, errors, math.nan), np.maximum(df, 1e-9)
    p = 2 * distributions.t.sf(np.abs(means) / errors, freedom)
    p_equal = distributions.t.sf((DELTA - np.abs(means)) / errors, freedom)
    p_decision = np.minimum(p, 2 * p_equal).clip(max=1.0)
    adjusted, level = step_up(p_decision, alpha)
    halves = distributions.t.ppf(0.5 + level / 2, freedom) * errors
    found: list[Decision] = []
    for i in range(len(contrasts)):
        said: Verdict = "cannot tell"
        if is_known[i] and adjusted[i] <= alpha:
            said = "equal" if 2 * p_equal[i] <= p[i] else "better" if means[i] > 0 else "worse"
        low, high = means[i] - halves[i], means[i] + halves[i]
        found.append(
            Decision(
                verdict=said, low=float(low), high=float(high), level=level, p=float(p[i]), p_equal=float(p_equal[i]),
                p_adjusted=float(adjusted[i]), sd=float(np.sqrt(variances[i])) if is_known[i] else math.nan,
                df=float(df[i]),
            )
        )  # fmt: skip
    return found


def spread(contrasts: Sequence[Contrast]) -> tuple[Floats, Floats, Prior]:
    """(moderated variances, their degrees of freedom, the prior they lean on); NaN and 0 where none is known."""
    variances, df = (np.array([getattr(c, name) for c in contrasts], dtype=float) for name in ("variance", "df"))
    pools = np.array([c.can_pool and c.df > 0 for c in contrasts], dtype=bool)
    prior = fit_prior(variances[pools], df[pools])
    variances[pools], df[pools] = moderated(variances[pools], df[pools], prior)
    return variances, df, prior
