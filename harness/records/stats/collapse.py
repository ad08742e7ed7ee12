"""Collapsed runs: the rate of collapse with its interval, when runs collapse, and whether an arm's do so sooner.

A run either trains or falls apart, so the mean of an arm of which some runs did is a number that no run has. Such
runs are counted, and the mean is over the others. Left out: runs that fall apart and come back, which did not collapse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import beta

from harness.records.stats.differences import MAX_EXACT, exchanges
from harness.records.stats.intervals import LEVEL, Floats

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
def rate(count: int, total: int) -> Rate:
    """The rate of `count` in `total` runs; [0, 1] without a run. Raises ValueError for counts outside 0..total."""
    if not 0 <= count <= total:
        raise ValueError(f"count={count} of total={total}: a count lies in 0..total")
    if not total:
        return Rate(count=0, total=0, low=0.0, high=1.0)
    tail = (1 - LEVEL) / (2 if 0 < count < total else 1)
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Rate(count=count, total=total, low=low, high=high)


def is_collapsed(start: float, end: float, has_diverged: bool = False) -> bool:
    """Did a run that started at one accuracy and ended at the other fall apart? A start of NaN: only where it
    diverged."""
    return has_diverged or (not math.isnan(start) and start >= MIN_START and end < SHARE * start)


@dataclass(frozen=True, kw_only=True)
class Fall:
    """Policy step at which a run was found collapsed, or up to which it was seen standing."""

    step: int
    has_fallen: bool


def fall(steps: Sequence[int], curve: Sequence[float], start: float, has_diverged: bool = False) -> Fall:
    """The first evaluation from which on a run stayed below `SHARE` of its start, where it collapsed.

    `curve`: accuracies at `steps`, those after the start; one that diverged is down where it has 0, whatever it started
    from. Raises ValueError for none, or for other numbers of both.
    """
    if not steps or len(steps) != len(curve):
        raise ValueError(f"steps={list(steps)}: an evaluation after the start for each of {len(curve)} accuracies")
    if not is_collapsed(start, curve[-1], has_diverged):
        return Fall(step=steps[-1], has_fallen=False)
    first = len(steps) - 1
    while first and (curve[first - 1] < SHARE * start or (has_diverged and curve[first - 1] == 0)):
        first -= 1
    return Fall(step=steps[first], has_fallen=True)


@dataclass(frozen=True, kw_only=True)
class LogRank:
    """Log-rank test of the runs of an arm, each paired with one of its control."""

    excess: float
    """Falls of the arm beyond those expected if both fell at one rate (Mantel, Cancer Chemother. Rep. 50, 1966)."""
    p: float
    """Two-sided: the share of all 2^n exchanges within pairs whose absolute excess is at least this one."""
    least_p: float
    """The smallest p that these pairs could have given: one above 0.05 says that nothing could have been shown."""


def log_rank(arm: Sequence[Fall], control: Sequence[Fall]) -> LogRank:
    """The test; a run is at risk at every step up to its own. Exact however few runs fall, and pairs may fall together,
    as those of a base do. p is NaN for no pairs or more than `MAX_EXACT`. Raises ValueError for other numbers of both.
    """
    if len(arm) != len(control):
        raise ValueError(f"{len(arm)} runs of the arm and {len(control)} of the control are no pairs")
    if not 1 <= len(arm) <= MAX_EXACT:
        excess = float(_excess(arm, control, np.zeros((1, len(arm)), int))[0]) if arm else math.nan
        return LogRank(excess=excess, p=math.nan, least_p=math.nan)
    found = _excess(arm, control, exchanges(len(arm)))  # as observed first
    p, least = (float(np.mean(np.abs(found) >= abs(value) - 1e-9)) for value in (found[0], np.abs(found).max()))
    return LogRank(excess=float(found[0]), p=p, least_p=least)


def _excess(arm: Sequence[Fall], control: Sequence[Fall], exchanged: np.ndarray) -> Floats:
    """[M] excess where the runs of some pairs are exchanged: `exchanged` [M, n] of 0 and 1."""
    times = np.unique([run.step for run in (*arm, *control) if run.has_fallen])

    def counted(runs: Sequence[Fall]) -> tuple[Floats, Floats]:
        steps, falls = np.array([run.step for run in runs]), np.array([run.has_fallen for run in runs])
        return (steps[:, None] >= times).astype(float), ((steps[:, None] == times) & falls[:, None]).astype(float)

    (at_risk, fell), (other_at_risk, other_fell) = counted(arm), counted(control)
    share = (fell.sum(0) + other_fell.sum(0)) / (at_risk.sum(0) + other_at_risk.sum(0))
    own, other = (fell - at_risk * share).sum(1), (other_fell - other_at_risk * share).sum(1)
    return np.asarray((1 - exchanged) @ own + exchanged @ other)
