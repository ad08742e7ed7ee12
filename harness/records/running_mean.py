"""The running mean of a series with gaps, for curves and for alarms."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.records.stats import Floats


def running_mean(values: Floats, window: int) -> Floats:
    """Mean of the last `window` values, fewer at the start; NaN left out, and NaN where there is nothing else."""
    known = pd.Series(np.where(np.isfinite(values), values, np.nan))
    return np.asarray(known.rolling(window, min_periods=1).mean())
