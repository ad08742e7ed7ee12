"""Floats of a few significant digits, for records that people read."""

from __future__ import annotations

import math
from typing import Any


def significant(value: Any, digits: int) -> Any:
    """The same value with floats of so many significant digits, in dicts and lists too. What is not finite becomes
    None, for which JSON has a word."""
    if isinstance(value, dict):
        return {key: significant(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [significant(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
