"""A duration in words."""

from __future__ import annotations

UNITS = (("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", 3600.0, 172800.0), ("d", 86400.0, float("inf")))
"""(unit, its seconds, seconds from which on the next one is taken)."""


def duration(seconds: float) -> str:
    """Seconds as a person says them, two digits of them where they are few: 4.2 s, 58 s, 12 min, 4.3 h, 180 d."""
    unit, size = next((unit, size) for unit, size, end in UNITS if seconds < end)
    value = seconds / size
    return f"{value:.{1 if value < 9.95 else 0}f} {unit}"
