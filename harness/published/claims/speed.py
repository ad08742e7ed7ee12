"""Speed tests on the throughput map: the sweeps they need, the factor that answers one, the source's beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.foundation.span import span
from harness.published.claims.kinds import Speed, Test
from harness.studies.throughput.factors import Factor, factor_at
from harness.studies.throughput.map_cells import Records
from harness.studies.throughput.plan import Sweep, read_sweep
from harness.studies.throughput.records import read_records
from harness.sweep import SWEEPS

SLACK = 0.03
"""A factor agrees within this of the claimed range."""


@dataclass(frozen=True, kw_only=True)
class Map:
    """One throughput sweep and what is measured of it."""

    sweep: Sweep
    records: Records


def maps_of(tests: Iterable[Test], results: Path, sweeps: Path = SWEEPS) -> dict[str, Map]:
    """Sweep -> its map, for every speed test. Raises ValueError naming a damaged file."""
    names = sorted({test.sweep for test in tests if isinstance(test, Speed)})
    read = {name: read_sweep(name, sweeps) for name in names}
    return {name: Map(sweep=sweep, records=read_records(results, sweep)) for name, sweep in read.items()}


def answer(test: Speed, maps: Mapping[str, Map]) -> Factor | None:
    """The map's answer; None where the cell is not measured."""
    if test.sweep not in maps:
        return None
    found = maps[test.sweep]
    return factor_at(found.sweep, found.records, test)


def place_words(test: Speed) -> str:
    """Place of the map that a test looks at, in words."""
    batch = "all batches" if test.batch is None else f"batch {test.batch}"
    what = f"a context of {test.length}" if test.measure == "decode" else f"{test.length} tokens"
    against = f" divided by {test.against_size}'s" if test.against_size else ""
    against += f" divided by that at {test.against_length}" if test.against_length else ""
    return f"{test.size} {test.precision} over {test.over}, {batch}, {what}{against}"


def compared_words(claimed: tuple[float, float] | None, value: float, lowest: float, highest: float) -> str:
    """The source's factor against ours and its range, in words; empty where the source has none."""
    if claimed is None:
        return ""
    low, high = claimed
    said = span(low, high, ".2f")
    if low - SLACK <= value <= high + SLACK:
        here = "the same here"
    elif lowest <= high + SLACK and highest >= low - SLACK:
        here = "within the range here"
    else:
        here = "less here" if value < low else "more here"
    return f"claimed {said}: {here}"
