"""A precision's rate over another's at one place of the map, with the range over the cells next to it.

The range stands for what a cell does not say: loads between its batch and the next, contexts between its length and
the next, and the noise of a single measurement. It is no confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from harness.studies.throughput.cost import decode_tokens_per_s, generation_tokens_per_s, ratio, reached
from harness.studies.throughput.map_cells import MapCell, Records
from harness.studies.throughput.plan import BASELINE, Sweep
from harness.studies.throughput.settled import disturbed_cells
from harness.studies.throughput.waiting import host_bound_cells

REACHED = 1
"""Steps of the grid to a neighbour, along batch and length."""


@dataclass(frozen=True, kw_only=True)
class MapPoint:
    """Place of the map that is asked for, as a speed test in `claims.yaml` writes it."""

    size: str
    precision: str
    length: int
    """Context of a step, or new tokens of a generation."""
    batch: int | None = None
    """None: all batches of the map answer."""
    measure: Literal["decode", "generation"] = "generation"
    over: str = BASELINE
    """The other precision, at the same size."""
    against_size: str | None = None
    """The factor is divided by this size's."""
    against_length: int | None = None
    """The factor is divided by that at this length."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The answer: a factor, its range over the place and its neighbours, and of how many cells."""

    value: float
    """Factor at the place; the geometric mean over all batches where the batch is open."""
    low: float
    high: float
    cells: int
    by_batch: tuple[tuple[int, float], ...]
    """The place's own cells: (batch, factor)."""
    is_disturbed: bool
    """Does one of the cells in the range rest on a cell that was disturbed (`settled`)?"""
    is_host_bound: bool
    """Does the place itself rest on a cell whose steps wait for the host (`waiting`)?"""


def factor_at(sweep: Sweep, records: Records, place: MapPoint) -> Factor | None:
    """The factor at a place, None where its own cell (or one that it is divided by) was not measured."""
    everything = {
        (batch, length): value
        for batch in sweep.batches
        for length in sweep.lengths
        if (value := _factor(sweep, records, place, batch, length)) is not None
    }
    own = {cell: value for cell, value in everything.items() if _steps(sweep, place, cell) == 0}
    if not own:
        return None
    near = {cell: value for cell, value in everything.items() if _steps(sweep, place, cell) <= REACHED}
    return Factor(
        value=math.exp(fmean(math.log(value) for value in own.values())),
        low=min(near.values()),
        high=max(near.values()),
        cells=len(near),
        is_disturbed=_rests_on(sweep, records, place, near, disturbed_cells),
        is_host_bound=_rests_on(sweep, records, place, own, host_bound_cells),
        by_batch=tuple((batch, value) for (batch, _), value in own.items()),
    )


def _steps(sweep: Sweep, place: MapPoint, cell: MapCell) -> int:
    """Distance of a cell from the place, in steps of the grid; every batch is at an open batch."""
    along = abs(sweep.lengths.index(cell[1]) - sweep.lengths.index(place.length))
    across = 0 if place.batch is None else abs(sweep.batches.index(cell[0]) - sweep.batches.index(place.batch))
    return max(along, across)


def _rests_on(
    sweep: Sweep,
    records: Records,
    place: MapPoint,
    near: Iterable[MapCell],
    kind: Callable[[Mapping[str, Any]], set[MapCell]],
) -> bool:
    """Does a factor of the cells `near` rest on a cell of that kind, of any of its engines?"""
    sizes = {place.size, place.against_size or place.size}
    stems = [f"{size}-{precision}" for size in sizes for precision in (place.precision, place.over)]
    marked = set[MapCell]().union(*(kind(records.get(stem, {})) for stem in stems))
    used = {(batch, place.against_length or length) for batch, length in near} | set(near)
    if place.measure == "decode":
        return bool(marked & used)
    return any(batch == own and at <= reached(sweep, length) for batch, length in used for own, at in marked)


def _factor(sweep: Sweep, records: Records, place: MapPoint, batch: int, length: int) -> float | None:
    """The factor of one cell."""
    if place.against_length is not None:
        plain = replace(place, against_length=None)
        return ratio(*(_factor(sweep, records, plain, batch, n) for n in (length, place.against_length)))
    if place.against_size is not None:
        plain = replace(place, against_size=None)
        both = (plain, replace(plain, size=place.against_size))
        return ratio(*(_factor(sweep, records, each, batch, length) for each in both))
    found = [records.get(f"{place.size}-{name}", {}) for name in (place.precision, place.over)]
    if place.measure == "decode":
        return ratio(*(decode_tokens_per_s(record, batch, length) for record in found))
    return ratio(*(generation_tokens_per_s(record, batch, sweep.prompt, length) for record in found))
