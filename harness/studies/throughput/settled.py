"""Disturbed cells: those whose measurement was disturbed, and the better of two measurements.

A neighbour on the machine only lengthens steps, so a disturbed cell shows in two ways: its steps spread, or all of
them lie above what the contexts next to it allow. The latter rests on the step being the larger of a constant (the
host's time) and a line in the context (the device's), which bends upwards alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Cells = Mapping[str, Mapping[str, Any]]
SPREAD = 1.3
"""90th over 10th percentile of the steps, above which a cell is disturbed."""
BEND = 1.1
"""Step over the line between the contexts next to it, above which a cell is disturbed."""
FALL = 1.05
"""Step at the shortest context over that at the next one, above which the former is disturbed."""
MOST_REPEATS = 2
"""Repeats of a disturbed cell, at most; then it stands, marked."""


def spread(cell: Mapping[str, Any]) -> float:
    """90th over 10th percentile of the steps; 1 where a cell has no percentiles."""
    low = cell.get("step_ms_p10")
    return cell["step_ms_p90"] / low if low else 1.0


def disturbed(found: Cells) -> dict[str, str]:
    """Key -> why, of the measured cells of one engine that were disturbed."""
    why = {
        key: f"p90/p10 = {spread(cell):.2f}" for key, cell in found.items() if _is_ok(cell) and spread(cell) > SPREAD
    }
    for key, over, limit in _bends(found):
        if over > limit:
            why.setdefault(key, f"{over:.2f} of what the contexts next to it allow")
    return {key: why[key] for key in found if key in why}


def _bends(found: Cells) -> Iterator[tuple[str, float, float]]:
    """(key, step over the line through the contexts next to it, limit); of a shortest context over the next one."""
    rows: dict[int, list[tuple[float, float, str]]] = {}
    for key, cell in found.items():
        if _is_ok(cell):
            rows.setdefault(int(key.partition("x")[0]), []).append((cell["context"], cell["step_ms"], key))
    for row in map(sorted, rows.values()):
        if len(row) > 1:
            yield row[0][2], row[0][1] / row[1][1], FALL
        for (x0, y0, _), (x, y, key), (x1, y1, _) in zip(row, row[1:], row[2:], strict=False):
            yield key, y / (y0 + (y1 - y0) * (x - x0) / (x1 - x0)), BEND


def disturbed_cells(record: Mapping[str, Any]) -> set[tuple[int, int]]:
    """(batch, length) of the disturbed cells of a record."""
    keys = (key.split("x") for key in disturbed(record.get("cells", {})))
    return {(int(batch), int(length)) for batch, length in keys}


def doubtful(found: Cells) -> list[str]:
    """Keys of the disturbed cells that have not been measured again often enough to stand."""
    return [key for key in disturbed(found) if found[key].get("repeats", 0) < MOST_REPEATS]


def quieter(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The one of two measurements of a cell whose 90th percentile is lower; "repeats" counts the later ones."""
    kept = new if new["step_ms_p90"] < old["step_ms_p90"] else old
    return dict(kept) | {"repeats": old.get("repeats", 0) + 1}


def _is_ok(cell: Mapping[str, Any]) -> bool:
    return cell.get("status") == "ok"
