"""AIS-R: golden interpolation, the coefficient by hand, its limits and its memory."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, nan

import pytest
import torch

from harness.objective.loss import start
from methods.ais_r import AISR, diagnostics
from methods.flashrl import TIS
from tests.loss_cases import (
    Algo,
    assert_exact,
    assert_published,
    corrected,
    golden_batch,
    golden_logp,
    random_batch,
    response,
    value_and_gradient,
)


def test_golden_interpolation() -> None:
    batch, logp = golden_batch(), golden_logp()
    for lam, value in ((0.5, -0.242294), (0.0, -0.176347), (1.0, -0.308242)):
        c = corrected([AISR(lam_min=lam, lam_max=lam)], batch)
        assert_published(value_and_gradient(logp, batch, c, Algo())[0].item(), value)


def test_golden_weights_between_none_and_all() -> None:
    rho = [0.5, 1.0, 4.0]
    _, batch = response([-1.0] * 3, old=[-1.0] * 3, rollout=[-1.0 - log(x) for x in rho], adv=1.0)
    for lam, weights in ((0.25, [0.875, 1.0, 1.25]), (0.0, [1.0] * 3), (1.0, [0.5, 1.0, 2.0])):
        c = corrected([AISR(lam_min=lam, lam_max=lam)], batch)
        assert_exact(c.weight, torch.tensor([weights], dtype=torch.float64))


def test_the_sample_size_and_the_variation_of_equal_weights_are_one_number() -> None:
    """ESS / n = 1 / (1 + CV^2) where nothing is truncated."""
    d = torch.tensor([4.0, 1.0, 1.0, 1.0], dtype=torch.float64).log()
    found = diagnostics(d, torch.ones(4, dtype=torch.bool), 100.0)
    assert_published([found["ess"], found["cv"] ** 2], [0.644737, 0.551020])
    assert_exact(found["ess"], 1 / (1 + found["cv"] ** 2))


def test_golden_diagnostics() -> None:
    batch = golden_batch()
    found = diagnostics(batch.old_logp - batch.rollout_logp, batch.mask, 2.0)
    assert_published(found["ess"], 0.874100)
    assert_published(found["div"], (0.1 + 1.2 + 0.3 + 0.05 + 0.9 + 0.2 + 0.02 + 0.02) / 9)
    # The published sample size of the raw weights is 1 / (1 + cv^2).
    assert_published(1 / (1 + found["cv"] ** 2), 0.704307)


@pytest.mark.parametrize("role", ["trust", "alarm"])
def test_coefficient_by_hand(role: str) -> None:
    _, batch = random_batch("coefficient", spread=0.05)
    d = (batch.old_logp - batch.rollout_logp)[batch.mask].tolist()
    n = len(d)
    raw = [exp(x) for x in d]
    cut = [min(x, 1.05) for x in raw]
    ess = sum(cut) ** 2 / (n * sum(x * x for x in cut))
    mean = sum(raw) / n
    cv = (sum((x - mean) ** 2 for x in raw) / n) ** 0.5 / mean
    trust = ess if role == "trust" else min(1.0, (1 - ess) / 0.3)
    lam = trust * (1 - exp(-(sum(map(abs, d)) / n) / 0.02)) / (1 + (cv / 0.5) ** 2)
    memory = dict[str, float]()
    part = AISR(cap=1.05, ess_role=role, div0=0.02, cv0=0.5)  # type: ignore[arg-type]
    c = part.correct(start(batch, 0.2, 0.2), batch, memory)
    assert memory["lam"] == pytest.approx(lam, rel=1e-12) and 0 < lam < 1
    assert memory["ess"] == pytest.approx(ess, rel=1e-12) and memory["cv"] == pytest.approx(cv, rel=1e-12)
    expected = torch.tensor([1 + lam * (x - 1) for x in cut], dtype=torch.float64)
    assert_exact(c.weight[batch.mask], expected)


def test_weights_lie_between_one_and_tis() -> None:
    for spread in (0.01, 0.3, 3.0):
        _, batch = random_batch("between", spread=spread)
        tis = corrected([TIS()], batch).weight
        for role in ("trust", "alarm"):
            weight = corrected([AISR(ess_role=role)], batch).weight  # type: ignore[arg-type]
            low, high = tis.clamp(max=1.0), tis.clamp(min=1.0)
            assert ((weight >= low - 1e-12) & (weight <= high + 1e-12)).all() and not weight.requires_grad


def test_roles_move_against_each_other() -> None:
    """A lower effective sample size at equal divergence and variation."""
    calm, wild = {"ess": 0.95, "div": 0.02, "cv": 0.3}, {"ess": 0.75, "div": 0.02, "cv": 0.3}
    assert AISR().coefficient(**wild) < AISR().coefficient(**calm)
    assert AISR(ess_role="alarm").coefficient(**wild) > AISR(ess_role="alarm").coefficient(**calm)
    assert AISR(ess_role="alarm").coefficient(ess=0.2, div=1e3, cv=0.0) == 1.0
    assert AISR(lam_max=0.4).coefficient(ess=1.0, div=1e3, cv=0.0) == 0.4
    assert AISR(lam_min=0.2).coefficient(ess=1.0, div=0.0, cv=0.0) == 0.2


def test_running_mean() -> None:
    part, memory, singles = AISR(beta=0.9), dict[str, float](), list[float]()
    for i in range(3):
        _, batch = random_batch("running", i, spread=0.02 * (i + 1))
        alone = dict[str, float]()
        AISR().correct(start(batch, 0.2, 0.2), batch, alone)
        singles.append(alone["lam"])
        part.correct(start(batch, 0.2, 0.2), batch, memory)
    mean = singles[0]
    for lam in singles[1:]:
        mean = 0.9 * mean + 0.1 * lam
    assert memory["lam"] == pytest.approx(mean, rel=1e-12)


def test_equal_policies_and_nothing_valid() -> None:
    _, batch = random_batch("equal")
    memory = dict[str, float]()
    equal = replace(batch, rollout_logp=batch.old_logp)
    AISR().correct(start(equal, 0.2, 0.2), equal, memory)
    assert memory == {"ess": pytest.approx(1.0), "div": 0.0, "cv": 0.0, "lam": 0.0}
    spoilt = replace(batch, rollout_logp=torch.full_like(batch.rollout_logp, nan))
    assert (AISR().correct(start(spoilt, 0.2, 0.2), spoilt, memory).weight == 1).all()


@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ({"lam_min": 0.6, "lam_max": 0.5}, "lam_min"),
        ({"div0": 0.0}, "div0"),
        ({"cap": -1.0}, "cap"),
        ({"beta": 1.0}, "beta"),
    ],
)
def test_bad_knobs(knob: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"AISR.{named}"):
        AISR(**knob)  # type: ignore[arg-type]
