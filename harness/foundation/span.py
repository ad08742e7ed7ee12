"""A range of numbers in words."""

from __future__ import annotations


def span(low: float, high: float, form: str) -> str:
    """Both ends in the format `form`, "1.2 to 1.5"; one number where they read alike."""
    first, last = f"{low:{form}}", f"{high:{form}}"
    return first if first == last else f"{first} to {last}"
