"""Numbers as cells of tables, a dash where there is none."""

from __future__ import annotations

import math

MOST_DIGITS = 6
"""Digits behind the point that show on which side of zero an end lies."""


def number_cell(value: float | None, form: str = ".3f") -> str:
    """A number in a form of `format`; "-" for None and NaN."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def with_interval(value: float | None, low: float | None, high: float | None, form: str, ends: str = "") -> str:
    """`0.52 [0.45, 0.59]`, the ends in the form `ends` (empty: in `form`, too) as `end_cell` prints them; without an
    interval the number alone, "-" without a number."""
    cell = number_cell(value, form)
    return cell if cell == "-" else f"{cell} {interval_cell(low, high, ends or form)}".rstrip()


def interval_cell(low: float | None, high: float | None, form: str) -> str:
    """`[0.45, 0.59]`, the ends as `end_cell` prints them; empty where there is none (None or NaN)."""
    if low is None or high is None or math.isnan(low):
        return ""
    return f"[{end_cell(low, form)}, {end_cell(high, form)}]"


def end_cell(value: float, form: str) -> str:
    """An end of an interval in a form of `format`. Where it has a sign and a fixed number of digits ("+.2f") and would
    read as zero, it gets as many digits as show its side: -0.004, not -0.00. Zero is what has none of six digits."""
    if not (form.startswith("+.") and form.endswith("f")):
        return format(value, form)
    for digits in range(int(form[2:-1]), MOST_DIGITS + 1):
        if float(text := f"{value:+.{digits}f}"):
            return text
    return format(0.0, form)
