"""From measured steps to what a reader asks: the cost of a whole generation, ratios to BF16, where they cross 1.

Left out: the prefill of the prompt, and sequences that end early; a batch here starts and ends together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.studies.throughput.map_cells import Records, entry, measured
from harness.studies.throughput.plan import BASELINE, Sweep

Point = tuple[float, float]
"""(context in tokens, step in ms), by rising context."""
REACH = 0.05
"""Share of the last context by which a curve is extended."""
NOISE = 0.03
"""A ratio within this of 1 is no difference."""


def curve(record: Mapping[str, Any], batch: int) -> list[Point]:
    """The measured steps of one batch size by context."""
    cells = measured(record).items()
    return sorted((float(cell["context"]), float(cell["step_ms"])) for (own, _), cell in cells if own == batch)


def integral(points: Sequence[Point], start: float, end: float) -> float | None:
    """Sum of the steps (ms x tokens) of contexts `start` to `end`, linear between points: the trapezoid rule.

    Before the first point the first stretch goes on, unless it falls; beyond the last the last one, by `REACH` at
    most. None where that does not reach, or with fewer than two points.
    """
    if len(points) < 2 or end > points[-1][0] * (1 + REACH) or end < start:
        return None
    (x0, y0), (x1, y1) = points[0], points[1]
    before = max(0.0, (y1 - y0) / (x1 - x0))
    (x2, y2), (x3, y3) = points[-2], points[-1]
    after = (y3 - y2) / (x3 - x2)
    knots = list(points)
    if start < x0:
        knots.insert(0, (start, y0 - before * (x0 - start)))
    if end > x3:
        knots.append((end, y3 + after * (end - x3)))
    x, y = np.array(knots).T
    at = np.array([start, *x[(start < x) & (x < end)], end])
    return float(np.trapezoid(np.interp(at, x, y), at))


def reached(sweep: Sweep, length: int) -> int:
    """The longest measured context that the cost of a generation of `length` tokens rests on."""
    end = sweep.prompt + length
    return min((n for n in sweep.lengths if n >= end), default=sweep.lengths[-1])


def generation_s(record: Mapping[str, Any], batch: int, prompt: int, length: int) -> float | None:
    """Seconds to decode `length` tokens after a prompt of `prompt`, for a batch that starts together."""
    total = integral(curve(record, batch), prompt, prompt + length)
    return None if total is None else total / 1e3


def generation_tokens_per_s(record: Mapping[str, Any], batch: int, prompt: int, length: int) -> float | None:
    """Tokens/s of such a generation."""
    seconds = generation_s(record, batch, prompt, length)
    return None if seconds is None else batch * length / seconds


def decode_tokens_per_s(record: Mapping[str, Any], batch: int, length: int) -> float | None:
    """Tokens/s of a cell, None where it was not measured."""
    return entry(record, batch, length).get("tokens_per_s")


def baseline_of(records: Records, size: str) -> Mapping[str, Any]:
    """The BF16 record of a size; empty where there is none."""
    return records.get(f"{size}-{BASELINE}", {})


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, None where either is missing."""
    return None if a is None or not b else a / b


def falls_below(ratios: Sequence[tuple[int, float]]) -> float | None:
    """The batch at which a ratio falls through 1 for good, linear in its logarithm; None where it does not.

    `ratios`: (batch, ratio) by rising batch. Where all are below 1, the first batch. A fall that does not reach
    1 - `NOISE` is none.
    """
    start = len(ratios)
    while start and ratios[start - 1][1] < 1:
        start -= 1
    if start == len(ratios) or min(value for _, value in ratios[start:]) > 1 - NOISE:
        return None
    if start == 0:
        return float(ratios[0][0])
    (a, u), (b, v) = ratios[start - 1], ratios[start]
    return math.exp(math.log(a) + (u - 1) / (u - v) * (math.log(b) - math.log(a)))


def decode_ratios(
    record: Mapping[str, Any], base: Mapping[str, Any], batches: Sequence[int], length: int
) -> list[tuple[int, float]]:
    """(batch, ratio of decode rates) where both were measured."""
    found = [
        (batch, ratio(decode_tokens_per_s(record, batch, length), decode_tokens_per_s(base, batch, length)))
        for batch in batches
    ]
    return [(batch, value) for batch, value in found if value is not None]
