"""Numbers as cells of tables."""

from __future__ import annotations

import math

from harness.foundation.number_cell import end_cell, interval_cell, number_cell, with_interval


def test_a_dash_stands_where_there_is_no_number() -> None:
    assert [number_cell(value, "+.1f") for value in (0.25, None, math.nan)] == ["+0.2", "-", "-"]
    assert number_cell(0.25) == "0.250"


def test_an_interval_stands_where_there_is_one() -> None:
    assert with_interval(0.5, 0.25, math.inf, ".2f") == "0.50 [0.25, inf]"
    assert with_interval(0.5, 0.25, 0.75, "+.3f", "+.1f") == "+0.500 [+0.2, +0.8]"
    assert with_interval(0.5, math.nan, math.nan, ".2f") == with_interval(0.5, None, None, ".2f") == "0.50"
    assert with_interval(None, None, None, ".2f") == with_interval(math.nan, 0.1, 0.2, ".2f") == "-"


def test_an_end_that_would_read_as_zero_shows_its_side() -> None:
    assert with_interval(-0.05, -0.1, -0.0041, "+.3f", "+.2f") == "-0.050 [-0.10, -0.004]"
    assert with_interval(0.02, 0.00049, 0.04, "+.3f") == "+0.020 [+0.0005, +0.040]"
    ends = [0.0049, 0.005, -0.00000051, 0.0000004, -1e-17, -0.0, 0.0, -0.3, math.inf, -math.inf]
    assert [end_cell(end, "+.2f") for end in ends] == [
        "+0.005", "+0.01", "-0.000001", "+0.00", "+0.00", "+0.00", "+0.00", "-0.30", "+inf", "-inf",
    ]  # fmt: skip
    assert with_interval(0.03, 0.0004, 0.07, ".3f", ".2f") == "0.030 [0.00, 0.07]"  # an accuracy has one side alone
    assert end_cell(-0.0004, "+.3g") == "-0.0004"


def test_an_interval_alone_has_the_same_ends():
    assert interval_cell(-0.0004, 0.0213, "+.3f") == "[-0.0004, +0.021]"
    assert interval_cell(None, 0.1, "+.3f") == interval_cell(math.nan, math.nan, ".2f") == ""
