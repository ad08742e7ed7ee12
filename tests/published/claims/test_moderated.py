"""Intervals of contrasts that lean on the other arms of the setting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as distributions

from harness.published.claims import evidence as evidence_module
from harness.published.claims.evidence import numbers
from harness.published.claims.kinds import Contrast
from harness.published.claims.moderated import is_steady
from harness.records import stats
from harness.records.run_result import Base
from tests.published.claims.hand_made import BF16, NAIVE, found, of, run

# Right answers of 8 at step 20 by seed; the control has 6, 6, 6. `naive` is a lucky arm: its three differences agree.
ARMS = {"flashrl": (5, 4, 6), "qurl": (4, 6, 5), "mis": (7, 5, 4), "opsm": (4, 4, 5), "naive": (5, 5, 5)}


def runs(arms: dict[str, tuple[int, ...]], **changes: int):
    right = arms | {"bf16": (6, 6, 6)}
    return [
        run(method, seed, {0: [1] * 7 + [0], 20: [1] * count + [0] * (8 - count)}, **changes)
        for method, counts in right.items()
        for seed, count in enumerate(counts)
    ]


TEST = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="below")


def test_a_run_is_scored_once_however_many_claims_ask(monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        evidence_module, "_score", lambda run, metric: asked.append((run.run_id, metric)) or float(run.seed)
    )
    evidence = of(*runs(ARMS))
    first, again = (numbers(evidence, evidence.arms[0][1], "auc", "mean") for _ in range(2))
    assert first == again == {(Base(seed, "aa"), seed): float(seed) for seed in range(3)} and len(asked) == 3
    assert numbers(evidence, evidence.arms[0][1], "gain", "mean") == first and len(asked) == 6


def test_a_lucky_arm_takes_the_spread_of_its_neighbours():
    alone = found(TEST, of(*runs({"naive": ARMS["naive"]})))
    assert alone.value == -0.125 and math.isnan(alone.low) and alone.reason.startswith("cannot tell: its bases do not")
    beside = found(TEST, of(*runs(ARMS)))
    assert beside.value == -0.125 and beside.low < -0.125 < beside.high
    # By hand from limma's equations, over the variances of all five differences with two degrees of freedom each.
    variances = np.array([np.var([c / 8 for c in counts], ddof=1) for counts in ARMS.values()])
    prior = stats.fit_prior(variances, np.full(5, 2.0))
    df = min(prior.df + 2, prior.limit)
    variance = prior.variance if np.isinf(prior.df) else (prior.df * prior.variance + 0.0) / (prior.df + 2)
    half = distributions.t.ppf(0.975, df) * np.sqrt(variance / 3)
    assert beside.high - beside.value == pytest.approx(half, rel=1e-6)


def test_arms_of_another_setting_lend_nothing():
    here, there = runs({"naive": ARMS["naive"]}), runs(ARMS, task__n=16)
    with_n = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="below", where={"task.n": 8})
    got = found(with_n, of(*here, *there))
    assert got.value == -0.125 and math.isnan(got.low) and math.isnan(got.high)


def test_an_arm_is_steady_where_no_run_ends_below_half_of_its_start():
    calm = run("naive", 0, {0: [1, 1, 1, 1], 20: [1, 1, 0, 0]})
    fallen = run("naive", 1, {0: [1, 1, 1, 1], 20: [1, 0, 0, 0]})
    evidence = of(calm, fallen)
    assert numbers(evidence, [fallen], "accuracy", "mean") == {(Base(1, "aa"), 1): 0.25}
    assert is_steady(evidence, [calm], "auc") and not is_steady(evidence, [calm, fallen], "rollout_auc")
