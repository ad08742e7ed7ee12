"""Figures of a search."""

from __future__ import annotations

from pathlib import Path

from harness.search.spec import Search


def draw_search(search: Search, results: Path) -> list[Path]:
    """Draw every figure."""
    return []
