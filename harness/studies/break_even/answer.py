"""The answer for one arm: its speedup against the control, and from which size and length on it is above 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness.records.stats import percentiles
from harness.studies.break_even.costs import StepCost
from harness.studies.break_even.laws import LENGTH_REACH, SIZE_REACH, Speedup, crossing
from harness.studies.break_even.time_to_accuracy import Race


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """From where on an arm pays along one axis, the other held at its largest measured value."""

    axis: str
    """"size" or "length"."""
    at: float
    """The value of the other axis."""
    measured: tuple[float, float]
    reach: float
    """Factor by which the law was extended."""
    value: float | None
    low: float
    high: float
    """Infinite where some resamples never cross."""
    best: float
    """Largest speedup along the line."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One arm against its control."""

    name: str
    precision: str
    speedup: Speedup
    measured: list[tuple[float, float, float]]
    """(size, length, ratio of median step costs) of the cells that both have."""
    crossings: list[Crossing]
    race: Race | None
    step_ratio: float
    """Control's step over the arm's in the largest setting that both ran."""
    setting: str


def crossings_of(speedup: Speedup, boots: Sequence[Speedup], costs: Sequence[StepCost]) -> list[Crossing]:
    """Points where a speedup crosses 1 in size and in length, with the spread of its resamples, NaN without any.

    An axis that does not vary is left out.
    """
    sizes, lengths = ([getattr(cost, name) for cost in costs] for name in ("size", "length"))
    found: list[Crossing] = []
    for axis, values, others, factor in (
        ("size", sizes, lengths, SIZE_REACH),
        ("length", lengths, sizes, LENGTH_REACH),
    ):
        low, high, at = min(values), max(values), max(others)
        if high < 1.2 * low:
            continue
        reach = high * factor
        ends = [crossing(partial(of.along, axis, at), low, reach) for of in boots]
        spread_low, spread_high = percentiles(np.array([math.inf if end is None else end for end in ends]))
        found.append(
            Crossing(
                axis=axis,
                at=at,
                measured=(low, high),
                reach=reach,
                value=crossing(partial(speedup.along, axis, at), low, reach),
                low=spread_low,
                high=spread_high,
                best=float(speedup.along(axis, at, np.geomspace(low, reach, 60)).max()),
            )
        )
    return found
