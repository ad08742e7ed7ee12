"""The running mean: short at the start, gaps left out."""

from __future__ import annotations

import numpy as np
import pytest

from harness.records.running_mean import running_mean


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (1, [np.nan, 2.0, 4.0, np.nan, 9.0]),
        (2, [np.nan, 2.0, 3.0, 4.0, 9.0]),
        (3, [np.nan, 2.0, 3.0, 3.0, 6.5]),
        (9, [np.nan, 2.0, 3.0, 3.0, 5.0]),
    ],
)
def test_running_mean_by_hand(window: int, expected: list[float]) -> None:
    np.testing.assert_array_equal(running_mean(np.array([np.inf, 2.0, 4.0, np.nan, 9.0]), window), expected)


def test_nothing_has_no_mean() -> None:
    assert running_mean(np.array([]), 3).tolist() == []
