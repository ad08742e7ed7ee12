"""Steps to reach an accuracy, from the learning curves: what a cheaper step must first make good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from harness.records.arms import Arm
from harness.records.run_result import RunResult, accuracies
from harness.records.stats import MIN_RESAMPLED, Floats, percentiles
from harness.records.statuses import FINISHED

GAIN = 0.9
"""The target: this share of what the control gains on a base from its start to its end."""
DRAWS = 1000
"""Resamples of the bases, which give a ratio its interval."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """An arm and its control on their way to an accuracy, which every base has its own of."""

    target: float
    """Accuracy to reach, the mean over bases."""
    reached: int
    """Runs of the arm that reach it."""
    runs: int
    steps: float
    """Median over the arm's runs; infinite where fewer than half reach it."""
    ratio: float
    """Steps of the arm over those of the control: how much cheaper a step must be before the arm is as fast."""
    low: float
    """Its 95 % interval over resampled bases; NaN below MIN_RESAMPLED of them."""
    high: float


def race(arm: Arm, control: Arm, rng: np.random.Generator) -> Race | None:
    """The race on the bases that both have and where the control gains; None where there is no such base, or where
    fewer than half of the control's runs arrive. The interval resamples bases."""
    curves, others = _by_base(arm), _by_base(control)
    targets, own, theirs = list[float](), list[Floats](), list[Floats]()
    shared = [base for base in curves if base in others]
    for base in shared:
        start, end = (float(np.mean([c[at, 1] for c in others[base]])) for at in (0, -1))
        if end > start:
            targets.append(start + GAIN * (end - start))
            for steps, group in ((own, curves[base]), (theirs, others[base])):
                steps.append(np.array([steps_to(c, targets[-1]) for c in group]))
    if not targets or np.isinf(np.median(np.concatenate(theirs))):
        return None

    def medians(bases: Sequence[int]) -> tuple[float, float]:
        a, b = (float(np.median(np.concatenate([steps[i] for i in bases]))) for steps in (own, theirs))
        return a, b

    every = range(len(targets))
    steps, control_steps = medians(every)
    drawn = np.array([medians(rng.integers(len(every), size=len(every)).tolist()) for _ in range(DRAWS)])
    low, high = percentiles(_ratio(drawn[:, 0], drawn[:, 1])) if len(every) >= MIN_RESAMPLED else (math.nan, math.nan)
    arrived = np.isfinite(np.concatenate(own))
    return Race(
        target=float(np.mean(targets)), reached=int(arrived.sum()), runs=len(arrived), steps=steps,
        ratio=steps / control_steps, low=low, high=high,
    )  # fmt: skip


def _by_base(arm: Arm) -> dict[Any, list[Floats]]:
    """Learning curves of its finished runs by base; without runs that were evaluated at their start and end alone:
    when these reached an accuracy nobody saw. A run that diverged counts however early it did."""
    found: dict[Any, list[Floats]] = {}
    for run in arm.runs:
        if run.status in FINISHED and len(points := curve(run)) > (0 if run.status == "diverged" else 2):
            found.setdefault(run.base, []).append(points)
    return found


def curve(run: RunResult) -> Floats:
    """[E, 2] of step and accuracy in the reference precision, by step."""
    return np.array(accuracies(run.evals, "reference"), dtype=np.float64).reshape(-1, 2)


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
