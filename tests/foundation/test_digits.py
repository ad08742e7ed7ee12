"""Significant digits in values of any depth."""

from __future__ import annotations

import math

from harness.foundation.digits import significant


def test_floats_alone_are_shortened_and_what_is_not_finite_is_none() -> None:
    value = {"a": 0.000123456, "b": [7, "x", True, (1234567.0, math.nan)], "c": {"d": -math.inf}, "e": None}
    wanted = {"a": 0.0001235, "b": [7, "x", True, [1235000.0, None]], "c": {"d": None}, "e": None}
    assert significant(value, 4) == wanted
