"""Numbers as cells of tables."""

from __future__ import annotations

import math

from harness.foundation.number_cell import number_cell, with_interval


def test_a_dash_stands_where_there_is_no_number() -> None:
    assert [number_cell(value, "+.1f") for value in (0.25, None, math.nan)] == ["+0.2", "-", "-"]
    assert number_cell(0.25) == "0.250"


def test_an_interval_stands_where_there_is_one() -> None:
    assert with_interval(0.5, 0.25, math.inf, ".2f") == "0.50 [0.25, inf]"
    assert with_interval(0.5, 0.25, 0.75, "+.3f", "+.1f") == "+0.500 [+0.2, +0.8]"
    assert with_interval(0.5, math.nan, math.nan, ".2f") == with_interval(0.5, None, None, ".2f") == "0.50"
    assert with_interval(None, None, None, ".2f") == with_interval(math.nan, 0.1, 0.2, ".2f") == "-"
