"""Collapsed runs, and the rate of collapse with its interval.

A run either trains or falls apart, so the mean of an arm of which some runs did is a number that no run has. Such
runs are counted, and the mean is over the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scipy.stats import beta

SHARE = 0.5
"""A run has collapsed where it ends below this share of the accuracy it started from."""
MIN_START = 0.05
"""Below this accuracy at the start there is nothing to fall from."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`count` of `total` runs, with the 95 % interval of Clopper and Pearson (Biometrika 26, 1934)."""

    count: int
    total: int
    low: float
    high: float
    """Upper end; where no run (or every run) collapsed the one open side has all of the 5 %."""

    def __str__(self) -> str:
        if not self.total:
            return "-"
        if not self.count:
            return f"0 of {self.total}: at most {self.high:.0%}".replace("%", " %")
        if self.count == self.total:
            return f"{self.count} of {self.total}: at least {self.low:.0%}".replace("%", " %")
        return f"{self.count} of {self.total}: {100 * self.low:.0f} to {self.high:.0%}".replace("%", " %")


@lru_cache(maxsize=4096)
def rate(count: int, total: int, level: float = 0.95) -> Rate:
    """The rate of `count` in `total` runs; [0, 1] without a run. Raises ValueError for counts outside 0..total."""
    if not 0 <= count <= total:
        raise ValueError(f"count={count} of total={total}: a count lies in 0..total")
    if not total:
        return Rate(count=0, total=0, low=0.0, high=1.0)
    tail = (1 - level) / (2 if 0 < count < total else 1)
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Rate(count=count, total=total, low=low, high=high)


def is_collapsed(start: float, end: float, has_diverged: bool = False) -> bool:
    """Did a run that started at one accuracy and ended at the other fall apart? A start of NaN: only where it
    diverged."""
    return has_diverged or (not math.isnan(start) and start >= MIN_START and end < SHARE * start)
