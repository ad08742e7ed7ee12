"""A test on its data: one value with a 95 % interval, or the reason why there is none yet.

Arms are compared base by base, as in the tables of sweeps, and the interval is Student's t over the bases
(`stats.contrast`); differences of accuracy take a variance that leans on the other arms of the setting
(`moderated.py`). Its level is higher than 95 % where the sweep was enlarged after somebody had read its verdicts.
Ratios and growth are means of logarithms, shown as factors. The interval of a speed test is a range over neighbouring
cells; an update test has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.published.claims.badges import Outcome, is_equal, judge
from harness.published.claims.evidence import (
    Evidence,
    grouped,
    numbers,
    pair_of,
    select,
    steps,
    words,
)
from harness.published.claims.kinds import (
    Contrast,
    Expect,
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
    Update,
    arms_of,
    kind_of,
)
from harness.published.claims.moderated import is_steady, moderated
from harness.published.claims.speed import Map, answer, compared_words
from harness.published.claims.update import Seconds, factor_of
from harness.records import stats
from harness.records.run_result import Pair
from harness.report.scores import has_moved

OF_BASE = ("model.", "task.", "base.")
"""Beginnings of the names of the settings that a base follows from."""
FIFTH = 5
"""Growth compares this part of a run's steps at its two ends."""
LEARNED = ("auc", "accuracy", "gain", "rollout_auc", "rollout_accuracy", "rollout_gain")
"""Scores that say nothing of an arm whose answers never changed."""
ReplayRow = Mapping[str, object]
Sides = tuple[dict[Pair, float], dict[Pair, float]]
"""(an arm's values, the other's) by base seed and seed; the other's are 0 where an arm is held against a number."""
Measured = tuple[str, ...]
"""One measurement: kind of test, metric, reduction, and the ids of the runs of one pair of seeds."""


@dataclass(frozen=True, kw_only=True)
class ClaimEstimate:
    """Result of a test. NaN where nothing was found."""

    outcome: Outcome
    """Domain and scale aside."""
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    units: int = 0
    """Bases, or runs of one base, that the interval is over; of speed, the cells."""
    reason: str = ""
    """Reason why it is not tested (yet), or why it is undecided."""
    against: tuple[float, float, float] | None = None
    """Replay: the other arm's value and interval."""
    counted: frozenset[Measured] = frozenset()
    """Measurements that it rests on, so that a further test of the same claim does not count it again."""

    @property
    def has_data(self) -> bool:
        return not math.isnan(self.value)


def estimate(
    test: Test,
    evidence: Mapping[str, Evidence],
    replayed: Sequence[ReplayRow],
    maps: Mapping[str, Map] | None = None,
    counted: Collection[Measured] = (),
    seconds: Mapping[str, Seconds] | None = None,
) -> ClaimEstimate:
    """The outcome of one test, without what is `counted` already.

    Raises ValueError where its settings fit more than one arm.
    """
    if isinstance(test, NotTestable):
        return ClaimEstimate(outcome="not testable here", reason=test.reason)
    if isinstance(test, Replay):
        return _replay(test, replayed)
    if isinstance(test, Speed):
        return _speed(test, maps or {})
    if isinstance(test, Update):
        return _update(test, seconds or {})
    found = evidence.get(test.sweep, Evidence())
    if not found.arms:
        return ClaimEstimate(outcome="undecided", reason=f"sweep {test.sweep} has no results")
    arms = arms_of(test)
    for arm in arms:
        if not (grouped(found, arm, test.along) if isinstance(test, Trend) else select(found, arm)):
            return ClaimEstimate(outcome="undecided", reason=f"sweep {test.sweep} has no run of {words(arm)}")
    if test.metric in LEARNED and (still := _still(test, found, arms)):
        return ClaimEstimate(outcome="undecided", reason=f"no signal: {still} never left its start")
    own, other = _slopes(test, found, arms) if isinstance(test, Trend) else _sides(test, found, arms)
    measured = _measured(test, found, arms)
    bases = {base for base, _ in other}
    own = {pair: value for pair, value in own.items() if pair[0] in bases}
    fresh = {pair: value for pair, value in own.items() if measured[pair] not in counted}
    if own and len(fresh) < 2 and len(fresh) < len(own):
        return ClaimEstimate(outcome="undecided", reason="its runs are those of a test above and count there")
    is_score = isinstance(test, Contrast) and test.metric in LEARNED
    compared = stats.contrast(fresh, other, not is_score or is_steady(found, select(found, arms[0]), test.metric))
    if is_score and compared.num_units > 1:
        compared = moderated(compared, found, select(found, arms[0]), select(found, arms[1]), test.metric)
    return replace(_judged(test, compared, found.level), counted=frozenset(measured[pair] for pair in fresh))


def _still(test: OfRuns, found: Evidence, arms: Sequence[Settings]) -> str:
    """The arms of which no run moved, in words."""
    site = "rollout" if "rollout" in test.metric else "reference"
    if isinstance(test, Trend):
        return ""
    return " and ".join(words(arm) for arm in arms if not any(has_moved(run, site) for run in select(found, arm)))


def _measured(test: OfRuns, found: Evidence, arms: Sequence[Settings]) -> dict[Pair, Measured]:
    """Pair -> what its value is made of."""
    by_seeds = _has_other_bases(test, arms)
    ids: dict[Pair, list[str]] = {}
    for arm in arms:
        groups = grouped(found, arm, test.along).values() if isinstance(test, Trend) else [select(found, arm)]
        for run in (run for group in groups for run in group):
            ids.setdefault(pair_of(run, by_seeds), []).append(run.run_id)
    return {pair: (kind_of(test), test.metric, test.reduce, *own) for pair, own in ids.items()}


def _has_other_bases(test: OfRuns, arms: Sequence[Settings]) -> bool:
    """True where a test compares settings of another model or task, so that no two of its runs share a base."""
    if isinstance(test, Trend):
        return test.along.startswith(OF_BASE)
    names = {name for arm in arms for name in arm if name.startswith(OF_BASE)}
    return any(arm.get(name) != arms[0].get(name) for arm in arms for name in names)


def _sides(test: Contrast | Ratio | Growth | Level, found: Evidence, arms: Sequence[Settings]) -> Sides:
    if isinstance(test, Growth):
        growth = {r.pair: _growth(steps(found, r, test.metric)) for r in select(found, arms[0])}
        return _beside_nothing({pair: value for pair, value in growth.items() if math.isfinite(value)})
    by_seeds = _has_other_bases(test, arms)
    per_arm = [numbers(found, select(found, arm), test.metric, test.reduce, by_seeds) for arm in arms]
    if isinstance(test, Level):
        return _beside_nothing(per_arm[0])
    if isinstance(test, Ratio):
        per_arm = [{pair: math.log(value) for pair, value in arm.items() if value > 0} for arm in per_arm]
    return per_arm[0], per_arm[1]


def _beside_nothing(values: dict[Pair, float]) -> Sides:
    return values, dict.fromkeys(values, 0.0)


def _growth(values: Sequence[float]) -> float:
    """log(mean of the last fifth / mean of the first fifth)."""
    size = len(values) // FIFTH
    if not size:
        return math.nan
    early, late = float(np.mean(values[:size])), float(np.mean(values[-size:]))
    return math.log(late / early) if early > 0 and late > 0 else math.nan


def _slopes(test: Trend, found: Evidence, arms: Sequence[Settings]) -> Sides:
    """Least-squares slope of every pair that has at least three places."""
    places, by_seeds = [grouped(found, arm, test.along) for arm in arms], _has_other_bases(test, arms)
    points: dict[Pair, list[tuple[float, float]]] = {}
    for place in places[0]:
        if any(place not in arm for arm in places):
            continue
        x = math.log2(place) if test.per == "doubling" else place
        a, *b = [numbers(found, arm[place], test.metric, test.reduce, by_seeds) for arm in places]
        for pair, value in a.items():
            if all(pair in other for other in b):
                points.setdefault(pair, []).append((x, value - sum(other[pair] for other in b)))
    slopes = {pair: float(np.polyfit(*np.array(xy).T, deg=1)[0]) for pair, xy in points.items() if len(xy) > 2}
    return _beside_nothing(slopes)


def _judged(test: OfRuns, found: stats.Contrast, level: float) -> ClaimEstimate:
    if found.num_units < 2:
        reason = f"sweep {test.sweep} gives {test.metric} on {found.num_units} of the 2 bases that an interval needs"
        return ClaimEstimate(outcome="undecided", units=found.num_units, reason=reason)
    is_log = isinstance(test, Ratio | Growth)
    threshold, margin = (math.log(test.threshold), math.log(test.margin)) if is_log else (test.threshold, test.margin)
    low, high = found.interval(level)
    if isinstance(test, Contrast) and test.metric in LEARNED and high - low <= stats.ROUNDING:
        reason = "cannot tell: its bases do not differ, which does not say how far others would lie apart"
        return ClaimEstimate(outcome="undecided", value=found.mean, units=found.num_units, reason=reason)
    outcome = judge(low, high, test.expect, threshold, margin)
    if outcome == "undecided":
        reason = _undecided(found, level, low, high, threshold, margin, test.expect)
    else:
        reason = "preliminary: 2 bases" if found.num_units < stats.MIN_SEEDS else ""
    value, low, high = (math.exp(x) if is_log else x for x in (found.mean, low, high))
    return ClaimEstimate(outcome=outcome, value=value, low=low, high=high, units=found.num_units, reason=reason)


def _undecided(
    found: stats.Contrast, level: float, low: float, high: float, threshold: float, margin: float, expect: Expect
) -> str:
    """Reason why an interval does not decide: it shows that there is nothing to see, or it is too wide. Then come the
    units that would give another outcome, or show equality, with a chance of 80 %."""
    if expect in ("above", "below") and is_equal(low, high, threshold, margin):
        return "equal within the margin"
    border, margin, far = {
        "above": (threshold, margin, 0.0),
        "below": (threshold, margin, 0.0),
        "equal": (threshold, margin, margin),
        "not_below": (threshold - margin, 0.0, 0.0),
        "not_above": (threshold + margin, 0.0, 0.0),
    }[expect]
    sd = math.sqrt(found.variance)
    more = stats.units_to_decide(found.mean - border, sd, found.num_units, found.df, level, margin, far)
    return f"cannot tell {stats.further(more)}"


def _speed(test: Speed, maps: Mapping[str, Map]) -> ClaimEstimate:
    found = answer(test, maps)
    if found is None:
        return ClaimEstimate(outcome="undecided", reason=f"{test.sweep} has not measured this")
    low, high, threshold, margin = (math.log(x) for x in (found.low, found.high, test.threshold, test.margin))
    outcome = "undecided" if found.is_host_bound else judge(low, high, test.expect, threshold, margin)
    is_flat = test.expect in ("above", "below") and is_equal(low, high, threshold, margin)
    undecided = "equal within the margin" if is_flat else "differs between neighbouring cells"
    if found.is_host_bound:
        undecided = "its steps wait for the host, so it says nothing about the format"
    noise = "some of its cells were disturbed while measured" if found.is_disturbed else ""
    compared = compared_words(test.claimed, found.value, found.low, found.high)
    parts = [undecided if outcome == "undecided" else "", compared, noise]
    reason = "; ".join(filter(None, parts))
    return ClaimEstimate(
        outcome=outcome, value=found.value, low=found.low, high=found.high, units=found.cells, reason=reason
    )


def _update(test: Update, seconds: Mapping[str, Seconds]) -> ClaimEstimate:
    value = factor_of(test, seconds)
    if value is None:
        return ClaimEstimate(outcome="undecided", reason=f"{test.file} has not measured this")
    at = math.log(value)
    outcome = judge(at, at, test.expect, math.log(test.threshold), math.log(test.margin))
    parts = ["equal within the margin" if outcome == "undecided" else "",
             compared_words(test.claimed, value, value, value)]  # fmt: skip
    return ClaimEstimate(outcome=outcome, value=value, low=value, high=value, reason="; ".join(filter(None, parts)))


def _replay(test: Replay, rows: Sequence[ReplayRow]) -> ClaimEstimate:
    def interval(arm: str) -> tuple[float, float, float] | None:
        wanted = {"context": test.context, "sampler": test.sampler, "age": test.age, "arm": arm}
        for row in rows:
            if all(row[name] == value for name, value in wanted.items()):
                value, low, high = (float(str(row[f"{test.column}{end}"])) for end in ("", "_low", "_high"))
                return None if math.isnan(low) else (value, low, high)
        return None

    own, other = interval(test.arm), interval(test.against) if test.against else None
    if own is None or (test.against and other is None):
        arm = test.arm if own is None else test.against
        at = f"{arm} on {test.sampler} of {test.context}, age {test.age}"
        reason = f"the replay laboratory has no interval of {test.column} of {at}"
        return ClaimEstimate(outcome="undecided", reason=reason)
    value, low, high = own
    if other is None:
        assert test.threshold is not None
        outcome = judge(low, high, test.expect, test.threshold, test.margin)
    else:  # two separate intervals: their extremes bound the difference
        outcome = judge(low - other[2], high - other[1], test.expect, 0.0, test.margin)
    reason = "cannot tell" if outcome == "undecided" else ""
    return ClaimEstimate(outcome=outcome, value=value, low=low, high=high, reason=reason, against=other)
