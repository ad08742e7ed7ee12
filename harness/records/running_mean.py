"""The running mean of a series with gaps, for curves and for alarms."""

from __future__ import annotations

import numpy as np

from harness.records.stats import Floats


def running_mean(values: Floats, window: int) -> Floats:
    """Mean of the last `window` values, fewer at the start; NaN left out, and NaN where there is nothing else."""
    known = np.isfinite(values)
    totals = np.cumsum(np.concatenate([[0.0], np.where(known, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], known]))
    start = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    total, count = totals[1:] - totals[start], counts[1:] - counts[start]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
