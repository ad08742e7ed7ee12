"""A test on its data: one value with a 95 % interval, or the reason why there is none yet.

Runs are compared pair by pair of seeds and the interval is Student's t over the pairs (`stats.paired`). Ratios and
growth are means of logarithms, shown as factors. The interval of a speed test is a range over neighbouring cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.published.claims.badges import Badge, is_equal, judge
from harness.published.claims.evidence import Evidence, Pair, grouped, numbers, select, steps, words
from harness.published.claims.kinds import (
    Contrast,
    Growth,
    Level,
    NotTestable,
    OfRuns,
    Ratio,
    Replay,
    Settings,
    Speed,
    Test,
    Trend,
    arms_of,
)
from harness.published.claims.speed import Map, answer, compared_words
from harness.records import stats

FIFTH = 5
"""Growth compares this part of a run's steps at its two ends."""
ReplayRow = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a test found. NaN where nothing was."""

    badge: Badge
    """Scale aside."""
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0
    reason: str = ""
    """Why it is not tested (yet), or what keeps it from being supported."""
    against: tuple[float, float, float] | None = None
    """Replay: the other arm's value and interval."""


def estimate(
    test: Test, evidence: Mapping[str, Evidence], replayed: Sequence[ReplayRow], maps: Mapping[str, Map] | None = None
) -> Estimate:
    """The outcome of one test. Raises ValueError where its settings fit more than one arm."""
    if isinstance(test, NotTestable):
        return Estimate(badge="not testable here", reason=test.reason)
    if isinstance(test, Replay):
        return _replay(test, replayed)
    if isinstance(test, Speed):
        return _speed(test, maps or {})
    found = evidence.get(test.sweep, Evidence())
    if not found.arms:
        return Estimate(badge="not tested yet", reason=f"sweep {test.sweep} has no results")
    arms = arms_of(test)
    for arm in arms:
        if not (grouped(found, arm, test.along) if isinstance(test, Trend) else select(found, arm)):
            return Estimate(badge="not tested yet", reason=f"sweep {test.sweep} has no run of {words(arm)}")
    values = _slopes(test, found, arms) if isinstance(test, Trend) else _values(test, found, arms)
    return _judged(test, values)


def _values(test: Contrast | Ratio | Growth | Level, found: Evidence, arms: Sequence[Settings]) -> dict[Pair, float]:
    if isinstance(test, Growth):
        growth = {(r.base_seed, r.seed): _growth(steps(found, r, test.metric)) for r in select(found, arms[0])}
        return {pair: value for pair, value in growth.items() if math.isfinite(value)}
    per_arm = [numbers(found, select(found, arm), test.metric, test.reduce) for arm in arms]
    if isinstance(test, Level):
        return per_arm[0]
    if isinstance(test, Ratio):
        per_arm = [{pair: math.log(value) for pair, value in arm.items() if value > 0} for arm in per_arm]
    a, b = per_arm
    return {pair: a[pair] - b[pair] for pair in a if pair in b}


def _growth(values: Sequence[float]) -> float:
    """log(mean of the last fifth / mean of the first fifth)."""
    size = len(values) // FIFTH
    if not size:
        return math.nan
    early, late = float(np.mean(values[:size])), float(np.mean(values[-size:]))
    return math.log(late / early) if early > 0 and late > 0 else math.nan


def _slopes(test: Trend, found: Evidence, arms: Sequence[Settings]) -> dict[Pair, float]:
    """Least-squares slope of every pair that has at least three places."""
    places = [grouped(found, arm, test.along) for arm in arms]
    points: dict[Pair, list[tuple[float, float]]] = {}
    for place in places[0]:
        if any(place not in arm for arm in places):
            continue
        x = math.log2(place) if test.per == "doubling" else place
        a, *b = [numbers(found, arm[place], test.metric, test.reduce) for arm in places]
        for pair, value in a.items():
            if all(pair in other for other in b):
                points.setdefault(pair, []).append((x, value - sum(other[pair] for other in b)))
    return {pair: float(np.polyfit(*np.array(xy).T, deg=1)[0]) for pair, xy in points.items() if len(xy) > 2}


def _judged(test: OfRuns, values: Mapping[Pair, float]) -> Estimate:
    if len(values) < 2:
        reason = (
            f"sweep {test.sweep} gives {test.metric} for {len(values)} of the 2 pairs of seeds that an interval needs"
        )
        return Estimate(badge="not tested yet", pairs=len(values), reason=reason)
    found = stats.paired(values, dict.fromkeys(values, 0.0))
    is_log = isinstance(test, Ratio | Growth)
    threshold, margin = (math.log(test.threshold), math.log(test.margin)) if is_log else (test.threshold, test.margin)
    badge = judge(found.low, found.high, test.expect, threshold, margin)
    if badge == "not supported":
        reason = _undecided(found, threshold, margin, test)
    else:
        reason = "preliminary: 2 pairs" if found.num_pairs < stats.MIN_SEEDS else ""
    value, low, high = (math.exp(x) if is_log else x for x in (found.mean, found.low, found.high))
    return Estimate(badge=badge, value=value, low=low, high=high, pairs=found.num_pairs, reason=reason)


def _undecided(found: stats.Difference, threshold: float, margin: float, test: OfRuns) -> str:
    """Why an interval does not decide: it shows that there is nothing to see, or it is too wide."""
    floor, ceiling = threshold - margin, threshold + margin
    if test.expect in ("above", "below") and is_equal(found.low, found.high, threshold, margin):
        return "equal within the margin"
    distance = {
        "above": max(abs(found.mean - threshold), margin),
        "below": max(abs(found.mean - threshold), margin),
        "equal": min(abs(found.mean - floor), abs(found.mean - ceiling)),
        "not_below": abs(found.mean - floor),
        "not_above": abs(found.mean - ceiling),
    }[test.expect]
    more = stats.further_seeds(found.sd, found.num_pairs, distance)
    return "cannot tell" if more is None else f"cannot tell (about {more} more pair{'s' * (more > 1)} of seeds)"


def _speed(test: Speed, maps: Mapping[str, Map]) -> Estimate:
    found = answer(test, maps)
    if found is None:
        return Estimate(badge="not tested yet", reason=f"{test.sweep} has not measured this")
    low, high, threshold, margin = (math.log(x) for x in (found.low, found.high, test.threshold, test.margin))
    badge = "not supported" if found.is_host_bound else judge(low, high, test.expect, threshold, margin)
    is_flat = test.expect in ("above", "below") and is_equal(low, high, threshold, margin)
    undecided = "equal within the margin" if is_flat else "differs between neighbouring cells"
    if found.is_host_bound:
        undecided = "its steps wait for the host, so it says nothing about the format"
    noise = "some of its cells were disturbed while measured" if found.is_disturbed else ""
    parts = [undecided if badge == "not supported" else "", compared_words(test, found), noise]
    reason = "; ".join(filter(None, parts))
    return Estimate(badge=badge, value=found.value, low=found.low, high=found.high, pairs=found.cells, reason=reason)


def _replay(test: Replay, rows: Sequence[ReplayRow]) -> Estimate:
    def interval(arm: str) -> tuple[float, float, float] | None:
        wanted = {"context": test.context, "sampler": test.sampler, "age": test.age, "arm": arm}
        for row in rows:
            if all(row[name] == value for name, value in wanted.items()):
                value, low, high = (float(str(row[f"{test.column}{end}"])) for end in ("", "_low", "_high"))
                return value, low, high
        return None

    own, other = interval(test.arm), interval(test.against) if test.against else None
    if own is None or (test.against and other is None):
        arm = test.arm if own is None else test.against
        reason = f"the replay laboratory has no {arm} on {test.sampler} of {test.context}, age {test.age}"
        return Estimate(badge="not tested yet", reason=reason)
    value, low, high = own
    if other is None:
        assert test.threshold is not None
        badge = judge(low, high, test.expect, test.threshold, test.margin)
    else:  # two separate intervals: their extremes bound the difference
        badge = judge(low - other[2], high - other[1], test.expect, 0.0, test.margin)
    reason = "cannot tell" if badge == "not supported" else ""
    return Estimate(badge=badge, value=value, low=low, high=high, reason=reason, against=other)
