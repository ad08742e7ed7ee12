"""Disturbed cells: those whose measurement was disturbed, and the better of two measurements.

A neighbour on the machine only lengthens steps, so a disturbed cell shows in two ways: its steps spread, or all of
them lie above what the contexts next to it allow. The latter rests on the step being the larger of a constant (the
host's time) and a line in the context (the device's), which bends upwards alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.studies.throughput.map_cells import MapCell, measured

SPREAD = 1.3
"""90th over 10th percentile of the steps, above which a cell is disturbed."""
BEND = 1.1
"""Step over the line between the contexts next to it, above which a cell is disturbed."""
FALL = 1.05
"""Step at the shortest context over that at the next one, above which the former is disturbed."""
MOST_REPEATS = 2
"""Repeats of a disturbed cell, at most; then it stands, marked."""


def disturbed_cells(record: Mapping[str, Any]) -> set[MapCell]:
    """The cells of a result file whose measurement was disturbed."""
    found = {at for at, cell in measured(record).items() if cell["step_ms_p90"] / cell["step_ms_p10"] > SPREAD}
    return found | set(_above_neighbours(record))


def _above_neighbours(record: Mapping[str, Any]) -> Iterator[MapCell]:
    """Cells above the line through the contexts next to them, and at the shortest context above the next one."""
    rows: dict[int, list[tuple[float, float, MapCell]]] = {}
    for at, cell in measured(record).items():
        rows.setdefault(at[0], []).append((cell["context"], cell["step_ms"], at))
    for row in map(sorted, rows.values()):
        if len(row) > 1 and row[0][1] / row[1][1] > FALL:
            yield row[0][2]
        for (x0, y0, _), (x, y, at), (x1, y1, _) in zip(row, row[1:], row[2:], strict=False):
            if y / (y0 + (y1 - y0) * (x - x0) / (x1 - x0)) > BEND:
                yield at


def doubtful(record: Mapping[str, Any]) -> list[MapCell]:
    """The disturbed cells that have not been measured again often enough to stand, in the order of the file."""
    disturbed = disturbed_cells(record)
    cells = measured(record).items()
    return [at for at, cell in cells if at in disturbed and cell.get("repeats", 0) < MOST_REPEATS]


def quieter(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The one of two measurements of a cell whose 90th percentile is lower; "repeats" counts the later ones."""
    kept = new if new["step_ms_p90"] < old["step_ms_p90"] else old
    return dict(kept) | {"repeats": old.get("repeats", 0) + 1}
