"""Numbers as cells of tables, a dash where there is none."""

from __future__ import annotations

import math


def number_cell(value: float | None, form: str = ".3f") -> str:
    """A number in a form of `format`; "-" for None and NaN."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def with_interval(value: float | None, low: float | None, high: float | None, form: str, ends: str = "") -> str:
    """`0.52 [0.45, 0.59]`, the ends in the form `ends` (empty: in `form`, too); without an interval the number alone,
    "-" without a number."""
    cell = number_cell(value, form)
    if cell == "-" or low is None or high is None or math.isnan(low):
        return cell
    return f"{cell} [{low:{ends or form}}, {high:{ends or form}}]"
