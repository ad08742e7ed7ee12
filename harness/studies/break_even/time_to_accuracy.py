"""Steps to reach an accuracy, from the learning curves: what a cheaper step must first make good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from harness.records.arms import Arm
from harness.records.run_result import RunResult
from harness.records.stats import Floats
from harness.records.statuses import FINISHED

GAIN = 0.9
"""The target: this share of what the control gains from its start to its end."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """An arm and its control on their way to one accuracy."""

    target: float
    reached: int
    """Runs of the arm that reach it."""
    runs: int
    steps: float
    """Median over the arm's runs; infinite where fewer than half reach it."""
    ratio: float
    """Steps of the arm over those of the control: how much cheaper a step must be before the arm is as fast."""
    low: float
    high: float


def race(arm: Arm, control: Arm, rng: np.random.Generator, draws: int = 1000) -> Race | None:
    """None where the control has no learning curve or does not gain. The interval resamples runs of both arms."""
    curves, others = ([curve(run) for run in a.runs if run.status in FINISHED] for a in (arm, control))
    curves, others = [c for c in curves if len(c) > 1], [c for c in others if len(c) > 1]
    if not curves or not others:
        return None
    start, end = (float(np.mean([c[at, 1] for c in others])) for at in (0, -1))
    if end <= start:
        return None
    target = start + GAIN * (end - start)
    own, theirs = (np.array([steps_to(c, target) for c in group]) for group in (curves, others))
    a, b = (np.median(x[rng.integers(len(x), size=(draws, len(x)))], axis=1) for x in (own, theirs))
    ratios = np.sort(_ratio(a, b))
    return Race(
        target=target, reached=int(np.isfinite(own).sum()), runs=len(own), steps=float(np.median(own)),
        ratio=float(_ratio(np.median(own, keepdims=True), np.median(theirs, keepdims=True))[0]),
        low=float(ratios[int(0.025 * draws)]), high=float(ratios[int(0.975 * draws)]),
    )  # fmt: skip


def curve(run: RunResult) -> Floats:
    """[E, 2] of step and accuracy in the reference precision, by step."""
    found = {r.step: r.accuracy for r in run.evals if r.site == "reference" and r.accuracy is not None}
    return np.array(sorted(found.items()), dtype=np.float64).reshape(-1, 2)


def steps_to(points: Floats, target: float) -> float:
    """The first step at which the straight lines between evaluations reach `target`; infinite where they never do."""
    if points[0, 1] >= target:
        return float(points[0, 0])
    for (x, y), (x_next, y_next) in pairwise(points):
        if y < target <= y_next:
            return float(x + (x_next - x) * (target - y) / (y_next - y))
    return math.inf


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b; infinite where the arm never arrives, 1 where neither does."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.isinf(a) & np.isinf(b), 1.0, a / b)
