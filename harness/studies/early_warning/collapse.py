"""Collapse of a run: the sampler's reward falls to half of its best and stays there, or the run diverges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from harness.records.stats import Floats

WINDOW = 5
"""Steps of the trailing mean of the reward, and how many in a row must be low."""
FALL = 0.5
"""Share of its best so far to which the reward falls."""
LOSS = 0.03
"""Accuracy in the reference precision that a run must lose from its start to be lost."""
Kind = Literal["collapsed", "hidden", "declining", "healthy"]


def smoothed(values: Floats) -> Floats:
    """Mean of the last WINDOW values, [N] -> [N]; NaN before the first full window, and where a value of it is NaN."""
    if len(values) < WINDOW:
        return np.full(len(values), np.nan)
    sums = np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")
    return np.concatenate([np.full(WINDOW - 1, np.nan), sums])


def drawdown(reward: Floats) -> Floats:
    """Share of its best so far that the smoothed reward has lost, [N] in [0, 1]; NaN before the first full window."""
    level = smoothed(reward)
    best = np.fmax.accumulate(level)
    return 1 - np.where(best > 0, level / np.where(best > 0, best, 1), 1.0) + 0 * level


def onset(reward: Floats, status: str = "ok") -> int | None:
    """The step at which the collapse begins: the first of WINDOW steps in a row with a drawdown of at least 1 - FALL.

    For a run that diverged, its last step at the latest. None without a collapse.
    """
    low = drawdown(reward) >= 1 - FALL
    runs = np.convolve(low, np.ones(WINDOW), mode="valid") if len(low) >= WINDOW else np.zeros(0)
    found = np.flatnonzero(runs > WINDOW - 0.5)
    if len(found):
        return int(found[0])
    return max(len(reward) - 1, 0) if status == "diverged" else None


def kind(reward: Floats, status: str = "ok", accuracy: Sequence[float] = ()) -> Kind:
    """Kind of end of a run; `accuracy` are its evaluations in the reference precision, in order.

    collapsed: `onset` finds a collapse. hidden: the sampler keeps its reward and the policy ends at least LOSS below
    its start in the reference precision, which nobody who watches the reward sees. declining: the reward ends below
    its start. healthy: none of these.
    """
    if onset(reward, status) is not None:
        return "collapsed"
    if len(accuracy) > 1 and accuracy[-1] <= accuracy[0] - LOSS:
        return "hidden"
    level = smoothed(reward)
    known = level[np.isfinite(level)]
    return "healthy" if len(known) and known[-1] >= known[0] else "declining"
