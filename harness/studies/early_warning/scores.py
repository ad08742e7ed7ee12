"""Scores of alarms, all at one false-alarm rate, with thresholds from other seeds than the runs that are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.records.stats import LEVEL, MIN_RESAMPLED, Floats
from harness.studies.early_warning.alarms import REWARD_DROP, Trace

RATE = 0.1
"""Share of healthy runs that may alarm at any step: what thresholds are set to."""
SLOW = 15
"""A collapse that begins before this step leaves no time for a warning; it is counted apart."""
REFERENCE = ("bf16", "int8")
"""Precisions of the runs a threshold could be taken from before anybody has low-bit runs."""
MIN_HEALTHY = 10
"""Fewer healthy runs of other seeds set no threshold."""
DRAWS = 500


@dataclass(frozen=True, kw_only=True)
class Score:
    """One statistic as an alarm. Shares are of runs; intervals resample arms, whose seeds rise and fall together."""

    name: str
    num_healthy: int
    num_collapsed: int
    """Slow collapses that recorded the signal, like the next four."""
    recall: float
    """Alarm before the onset."""
    recall_low: float
    recall_high: float
    lead: float
    """Median steps between alarm and onset, misses counted as 0."""
    lead_low: float
    lead_high: float
    gain: float
    """Median of its lead less that of the reward drop, run by run."""
    gain_low: float
    gain_high: float
    recall_fast: float
    """Recall of the collapses before SLOW."""
    false_alarms: float
    """Share of healthy runs of held-out seeds that alarm."""
    precision: float
    """Slow collapses warned of over all alarms, at the shares of collapsed and healthy runs found here; NaN
    without an alarm."""
    first: float
    """Share of slow collapses in which no other signal alarmed earlier (ties shared; the reward drop stands out)."""
    hidden: float
    """Share of the hidden losses in which it alarms at any step."""
    reference_alarms: float
    """Share of healthy runs beyond REFERENCE above the 99th percentile of the steps of REFERENCE runs."""


def within_format(runs: Sequence[Trace]) -> list[Trace]:
    """The same runs, with thresholds taken within each format: for who knows what its healthy runs look like."""
    return [replace(run, context=f"{run.context} {run.precision}") for run in runs]


def by_reward(runs: Sequence[Trace]) -> list[Trace]:
    """The same runs, hidden losses counted by what their reward shows: mostly as healthy."""
    return [replace(run, kind=run.reward_kind) for run in runs]


def score_all(runs: Sequence[Trace]) -> list[Score]:
    """Every statistic, from the highest recall to the lowest."""
    names = list(dict.fromkeys(name for run in runs for name in run.statistics))
    alarms = {name: alarm_steps(runs, name) for name in names}
    earliest = _first(alarms)
    scores = [_score(name, runs, alarms, earliest) for name in names]
    return sorted((s for s in scores if s.num_collapsed), key=lambda s: (-s.recall, -s.lead))


def threshold(healthy: Sequence[Trace], name: str) -> float:
    """The value that a share of at most RATE of these runs exceeds at any step; infinite for too few of them."""
    peaks = [_peak(run.statistics[name]) for run in healthy if name in run.statistics]
    if len(peaks) < MIN_HEALTHY:
        return math.inf
    return float(np.quantile(peaks, 1 - RATE, method="higher"))


def alarm_steps(runs: Sequence[Trace], name: str) -> list[float]:
    """Per run the first step above the threshold from healthy runs of its context and of other folds; infinite where
    there is none, NaN where the run did not record the signal or no threshold could be set."""
    limits: dict[tuple[str, int], float] = {}
    found: list[float] = []
    for run in runs:
        key = run.context, run.fold
        if key not in limits:
            others = [r for r in runs if r.context == key[0] and r.fold != key[1] and r.kind == "healthy"]
            limits[key] = threshold(others, name)
        values = run.statistics.get(name)
        known = values is not None and math.isfinite(limits[key])
        found.append(first_above(values, limits[key]) if known and values is not None else math.nan)
    return found


def first_above(values: Floats, limit: float) -> float:
    """The first step above a threshold; infinite where none is."""
    above = np.flatnonzero(values > limit)
    return float(above[0]) if len(above) else math.inf


def _peak(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else -math.inf


def lead(run: Trace, alarm: float) -> float:
    """Steps from the alarm to the onset; 0 for an alarm at or after it, or none."""
    assert run.onset is not None
    return max(0.0, run.onset - alarm) if math.isfinite(alarm) else 0.0


def _is_slow(run: Trace) -> bool:
    return run.onset is not None and run.onset >= SLOW


def _first(alarms: Mapping[str, list[float]]) -> list[float]:
    """Per run the earliest alarm of any signal; the reward drop is the event itself and does not race."""
    rows = np.array([values for name, values in alarms.items() if name != REWARD_DROP])
    return [float(x) for x in np.nanmin(np.where(np.isnan(rows), math.inf, rows), axis=0)] if len(rows) else []


def _score(name: str, runs: Sequence[Trace], alarms: Mapping[str, list[float]], earliest: Sequence[float]) -> Score:
    own = alarms[name]
    seen = [i for i, alarm in enumerate(own) if not math.isnan(alarm)]
    slow = [i for i in seen if _is_slow(runs[i])]
    fast = [i for i in seen if runs[i].kind == "collapsed" and i not in set(slow)]
    healthy = [i for i in seen if runs[i].kind == "healthy"]
    leads = np.array([lead(runs[i], own[i]) for i in slow])
    drop = alarms.get(REWARD_DROP, own)
    gains = leads - np.array([lead(runs[i], drop[i]) for i in slow])
    hits = (leads > 0).astype(float)
    false = [math.isfinite(own[i]) for i in healthy]
    num_alarms = float(hits.sum()) + sum(false)
    others = [alarms[n] for n in alarms if n != REWARD_DROP]
    shares = [
        1 / sum(a[i] == earliest[i] for a in others) if own[i] == earliest[i] and hits[k] else 0.0
        for k, i in enumerate(slow)
    ]
    arms = [runs[i].arm for i in slow]
    reduces: list[tuple[Floats, Callable[[Floats], Any]]] = [(hits, np.mean), (leads, np.median), (gains, np.median)]
    intervals = [cluster_interval(values, arms, reduce) for values, reduce in reduces]
    return Score(
        name=name, num_healthy=len(healthy), num_collapsed=len(slow), recall=_mean(hits),
        recall_low=intervals[0][0], recall_high=intervals[0][1],
        lead=float(np.median(leads)) if len(leads) else math.nan, lead_low=intervals[1][0], lead_high=intervals[1][1],
        gain=float(np.median(gains)) if len(gains) else math.nan, gain_low=intervals[2][0], gain_high=intervals[2][1],
        recall_fast=_mean([lead(runs[i], own[i]) > 0 for i in fast]), false_alarms=_mean(false),
        precision=float(hits.sum()) / num_alarms if num_alarms else math.nan,
        first=_mean(shares) if name != REWARD_DROP else math.nan,
        hidden=_mean([math.isfinite(own[i]) for i in seen if runs[i].kind == "hidden"]),
        reference_alarms=reference_alarms(runs, name),
    )  # fmt: skip


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def cluster_interval(values: Floats, clusters: Sequence[str], reduce: Callable[[Floats], Any]) -> tuple[float, float]:
    """Percentile interval that resamples whole clusters; NaN below MIN_RESAMPLED of them."""
    groups = [values[[c == name for c in clusters]] for name in dict.fromkeys(clusters)]
    if len(groups) < MIN_RESAMPLED:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = [
        float(reduce(np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(draws, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return float(low), float(high)


def reference_alarms(runs: Sequence[Trace], name: str) -> float:
    """False alarms on healthy runs of other formats, where steps of bf16 and int8 runs alone set the threshold."""
    flags: list[bool] = []
    for context in dict.fromkeys(run.context for run in runs):
        inside = [r for r in runs if r.context == context and r.kind == "healthy" and name in r.statistics]
        known = [r.statistics[name] for r in inside if r.precision in REFERENCE]
        if known:
            values = np.concatenate(known)
            limit = float(np.nanquantile(values, 0.99)) if np.isfinite(values).any() else math.inf
            flags += [
                math.isfinite(first_above(r.statistics[name], limit)) for r in inside if r.precision not in REFERENCE
            ]
    return _mean(flags)
