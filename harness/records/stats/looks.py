"""Looks at a comparison while its seeds arrive: the level of one look, and which arms get another seed.

Whoever tests after every seed and stops at the first verdict is wrong more often than the level says. Pocock's
boundaries (Biometrika 64, 1977) take one lower level at every look, such that the chance to cross it at any of them is
the level of the whole. That bounds the error of every rule for stopping at one of these looks, so arms may be dropped
and others go on. The level is exact for normal differences of known variance; what moderated variances, collapses and
the step-up over arms add is simulated in results/tables/stats_coverage.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from scipy import optimize, special
from scipy import stats as distributions

from harness.records.stats.intervals import LEVEL, Floats
from harness.records.stats.outcomes import NO_SIGNAL, Judged, is_decided
from harness.records.stats.verdicts import DELTA, POWER

Step = Literal["decided", "no signal", "out of seeds", "hopeless", "more seeds"]
"""Finding of a look on an arm; `more seeds` alone lets it go on."""
MOST = 1000
"""Further units that `units_to_decide` looks at."""
NUM_NODES = 96
"""Nodes of the Gauss-Legendre rule: crossing chances are then exact to 1e-8 for up to 50 looks."""


def crossing_chance(sizes: Sequence[int], level: float) -> float:
    """Chance that the mean of standard normal values is significant at the two-sided `level` after some of `sizes`.

    `sizes` are the numbers of values at the looks, rising. The recursion of Armitage, McPherson and Rowe (J. R. Stat.
    Soc. A 132, 1969): the density of the sum where no look was significant is integrated from look to look.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    bound = distributions.norm.isf(level / 2)
    ends = bound * np.sqrt(sizes)
    sums = ends[0] * nodes
    density = distributions.norm.pdf(sums, scale=math.sqrt(sizes[0]))
    for before, after, size in zip(ends, ends[1:], np.diff(sizes), strict=False):
        next_sums = after * nodes
        kernel = distributions.norm.pdf(next_sums[:, None] - sums, scale=math.sqrt(size))
        density, sums = kernel @ (before * weights * density), next_sums
    return float(1 - ends[-1] * weights @ density)


@lru_cache(maxsize=256)
def level_per_look(sizes: tuple[int, ...], alpha: float) -> float:
    """The level of each look that makes the chance to cross it at any look `alpha` (Pocock's boundaries). `sizes` are
    one or more, rising from at least 1, as `harness.records.sweep_file.Sizes` are."""
    if len(sizes) == 1:
        return alpha
    found: Any = optimize.brentq(lambda x: crossing_chance(sizes, x) - alpha, alpha / len(sizes), alpha, xtol=1e-10)
    return float(found)


def chance_to_decide(found: Judged, more_units: int) -> float:
    """Chance that so many more units of this arm would show a difference, or equality.

    The predictive power of Spiegelhalter, Freedman and Blackburn (Controlled Clinical Trials 7, 1986) with a flat prior
    on the difference, the standard deviation and the level as they are: the mean of all units is then normal around
    today's. 1 where the variance is not known yet.
    """
    contrast, decision = found.contrast, found.decision
    if contrast is None or decision is None or math.isnan(decision.sd):
        return 1.0
    more = np.array([more_units], np.float64)
    return float(_chances(contrast.mean, decision.sd, contrast.num_units, decision.df, decision.level, DELTA, more)[0])


def units_to_decide(
    mean: float, sd: float, num_units: int, df: float, level: float = LEVEL, margin: float = DELTA, far: float = 0.0
) -> float | None:
    """Number of further units that would decide with a chance of POWER, the smallest: the chance is that of
    `chance_to_decide`.

    `mean` and `sd` are those of a unit's difference over `num_units`, `df` the degrees of freedom of the s.d., `level`
    that of the interval. Decided is an interval inside ±`margin`, or one that lies beyond ±`far` (at most `margin`) on
    one side. Infinity where MOST further units do not decide, None where the s.d. is not known (NaN).
    """
    if math.isnan(sd):
        return None
    more = np.arange(1, MOST + 1, dtype=np.float64)
    enough = _chances(mean, sd, num_units, df, level, margin, more, far) >= POWER
    return float(more[np.argmax(enough)]) if enough.any() else math.inf


def further(more: float | None) -> str:
    """Further units that would decide, as tables print them: `(+4)`, `(>1000)` for infinitely many, and nothing where
    they are not known (None or NaN)."""
    if more is None or math.isnan(more):
        return ""
    return f"(+{more:.0f})" if math.isfinite(more) else f"(>{MOST})"


def _chances(
    mean: float, sd: float, num_units: int, df: float, level: float, margin: float, more: Floats, far: float = 0.0
) -> Floats:
    """`chance_to_decide` for each of the numbers `more` ([N] float64, further units)."""
    units = num_units + more
    half = special.stdtrit(df + more, 0.5 + level / 2) * sd / np.sqrt(units)
    spread = np.maximum(sd * np.sqrt(1 / num_units - 1 / units), 1e-12)
    inside = np.clip(np.minimum(margin - half, far + half), 0.0, None)
    away = special.ndtr((-far - half - mean) / spread) + special.ndtr((mean - far - half) / spread)
    return away + special.ndtr((inside - mean) / spread) - special.ndtr((-inside - mean) / spread)


def next_step(found: Judged, num_seeds: int, max_seeds: int, hopeless: float) -> Step:
    """The step of an arm after a look: it goes on, or the reason why it does not.

    No signal so far, or decided; else out of seeds, or hopeless: all the seeds it may still get would decide it with a
    chance below `hopeless`. A later look judges anew: an arm whose verdict fell, since the others of its setting
    changed, goes on.
    """
    if found.verdict == NO_SIGNAL:
        return "no signal"
    if is_decided(found.verdict):
        return "decided"
    if num_seeds >= max_seeds:
        return "out of seeds"
    return "hopeless" if chance_to_decide(found, max_seeds - num_seeds) < hopeless else "more seeds"
