"""Verdicts on comparisons, and corrections for many comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as distributions

from harness.records.stats.intervals import ROUNDING, Floats

Verdict = Literal["better", "equal", "worse", "cannot tell"]

MIN_SEEDS = 3
"""Fewer seeds than this are marked preliminary."""
DELTA = 0.03
"""Accuracy differences below this do not matter: what "equal" means."""
POWER = 0.8
"""Chance with which `units_to_decide` decide."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment over one family of tests (Scand. J. Stat. 6, 1979); NaN stays out of the family."""
    family = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    worst = 0.0
    for rank, (p, index) in enumerate(family):
        worst = max(worst, min(1.0, p * (len(family) - rank)))
        adjusted[index] = worst
    return adjusted


def step_up(p_values: ArrayLike, alpha: float) -> tuple[Floats, float]:
    """(Benjamini and Hochberg's step-up adjustment of the [N] p (J. R. Stat. Soc. B 57, 1995), the level of the
    intervals that go with those at most `alpha`). NaN stays out of the family."""
    adjusted = np.array(p_values, float)
    family = ~np.isnan(adjusted)
    adjusted[family] = distributions.false_discovery_control(adjusted[family])
    num_decided = int(np.sum(adjusted <= alpha))
    return adjusted, 1 - alpha * max(num_decided, 1) / max(int(family.sum()), 1)


def verdict(low: float, high: float, margin: float = DELTA) -> Verdict:
    """Verdict that the interval of one difference allows, by itself.

    Inside (-margin, margin): equal. Otherwise away from 0: better or worse. Everything else, an interval of NaN, and
    one without width: cannot tell.
    """
    if not high - low > ROUNDING:
        return "cannot tell"
    if low > -margin and high < margin:
        return "equal"
    return "better" if low > 0 else "worse" if high < 0 else "cannot tell"
