"""Durations in words."""

from __future__ import annotations

import pytest

from harness.foundation.duration import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.0 s"), (4.21, "4.2 s"), (9.96, "10 s"), (58.4, "58 s"), (90, "1.5 min"), (720, "12 min"),
        (5400, "1.5 h"), (15480, "4.3 h"), (172799, "48 h"), (172800, "2.0 d"), (15527031, "180 d"),
    ],
)  # fmt: skip
def test_a_duration_is_said_in_the_unit_of_its_size(seconds: float, said: str) -> None:
    assert duration(seconds) == said
