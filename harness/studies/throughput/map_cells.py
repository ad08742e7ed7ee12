"""Cells of the map of decode rates: their names in an engine's result file, and those that have a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MapCell = tuple[int, int]
"""(batch, length): one cell of the map of decode rates."""
Records = Mapping[str, Mapping[str, Any]]
"""`<size>-<precision>` -> result file of that engine."""


def cell_key(batch: int, length: int) -> str:
    """The name of a cell in a result file."""
    return f"{batch}x{length}"


def cell_of(key: str) -> MapCell:
    """The cell that has this name."""
    batch, length = map(int, key.split("x"))
    return batch, length


def entry(record: Mapping[str, Any], batch: int, length: int) -> Mapping[str, Any]:
    """The entry of a cell in a result file, measured or not; empty where there is none."""
    return record.get("cells", {}).get(cell_key(batch, length), {})


def measured(record: Mapping[str, Any]) -> dict[MapCell, Mapping[str, Any]]:
    """The cells of a result file that were measured, with what it says of each."""
    return {cell_of(key): cell for key, cell in record.get("cells", {}).items() if cell["status"] == "ok"}
