"""MiniRL: golden rows of weight, gate and gradient, a loop over random tokens, and what the gate does not look at."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
import torch

from harness.config.compose import compose
from methods.flashrl import TIS
from methods.minirl import METHOD, MiniRL, open_gate
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective, updated
from tests.toy import small_config

SUM = Algo(agg="seq-mean-token-sum")


@pytest.mark.parametrize(
    ("adv", "rollout", "logp", "ratio", "weight", "is_kept", "slope"),
    [
        (1.0, -1.2, -0.8, 1.221403, 1.491825, True, -1.491825),
        (1.0, -1.2, -0.75, 1.284025, 1.568312, False, 0.0),
        (-1.0, -1.2, -1.2, 0.818731, 1.0, True, 1.0),
        (-1.0, -1.2, -1.25, 0.778801, 0.951229, False, 0.0),
        (-1.0, -3.5, -0.5, 1.648721, 5.0, True, 5.0),
        (0.0, -1.2, -0.75, 1.284025, 1.568312, True, 0.0),
    ],
)
def test_golden_rows(
    adv: float, rollout: float, logp: float, ratio: float, weight: float, is_kept: bool, slope: float
) -> None:
    current, batch = response([logp], old=[-1.0], rollout=[rollout], adv=adv)
    assert_published(exp(logp + 1.0), ratio)
    assert updated(METHOD.parts, current, batch).keep.item() == is_kept
    value, grad = objective(METHOD.parts, current, batch, SUM)
    assert_published(grad.item(), slope)
    assert_published(value.item(), -weight * adv * logp if is_kept else 0.0)


def test_equals_a_loop() -> None:
    logp, batch = random_batch("minirl", size=(24, 8), spread=1.2)
    total, slopes, num_gated, num_capped = 0.0, torch.zeros_like(logp), 0, 0
    for i, t in batch.mask.nonzero().tolist():
        adv, now, old, sampled = (x[i, t].item() for x in (batch.adv, logp, batch.old_logp, batch.rollout_logp))
        ratio, whole = exp(now - old), exp(now - sampled)
        is_gated = (adv > 0 and ratio > 1.27) or (adv < 0 and ratio < 0.8)
        num_gated, num_capped = num_gated + is_gated, num_capped + (whole > 5)
        if not is_gated:
            total -= min(whole, 5.0) * adv * now
            slopes[i, t] = -min(whole, 5.0) * adv
    num_responses = int(batch.mask.any(-1).sum())
    assert num_gated > 5 and num_capped > 5
    value, grad = objective(METHOD.parts, logp, batch, SUM)
    assert_exact(value.item(), total / num_responses)
    assert_exact(grad, slopes / num_responses)


def test_the_gate_reads_staleness_and_the_sign_and_never_the_sampler() -> None:
    logp, batch = random_batch("gate", size=(12, 8))
    keep = updated(METHOD.parts, logp, batch).keep
    assert 0 < keep.sum() < batch.mask.sum()
    far = replace(batch, rollout_logp=batch.rollout_logp - 3.0)
    assert torch.equal(updated(METHOD.parts, logp, far).keep, keep)
    assert not torch.equal(updated(METHOD.parts, logp, replace(batch, adv=-batch.adv)).keep, keep)
    edge = torch.tensor([0.8, 1.27, 0.79, 1.28], dtype=torch.float64)
    for sign, expected in ((1, [True, True, True, False]), (-1, [True, True, False, True]), (0, [True] * 4)):
        assert open_gate(edge, torch.full_like(edge, sign), 0.8, 1.27).tolist() == expected


def test_the_weight_is_a_constant_and_a_correction_weight_is_ignored() -> None:
    logp, batch = random_batch("weight", spread=1.0)
    alone, weighted = (objective(parts, logp, batch, SUM) for parts in (METHOD.parts, (TIS(), *METHOD.parts)))
    assert all(torch.equal(a, b) for a, b in zip(alone, weighted, strict=True))
    low_cap = objective([MiniRL(cap=1.5)], logp, batch, SUM)[1]
    assert (low_cap.abs() <= alone[1].abs()).all() and (low_cap != alone[1]).any()


def test_refusals() -> None:
    for knobs, words in (
        ({"cap": 0.9}, r"MiniRL.cap: 0.9"),
        ({"low": 1.1}, r"MiniRL.low, high: 1.1, 1.27"),
        ({"high": 0.9}, r"MiniRL.low, high: 0.8, 0.9"),
        ({"low": -0.1}, r"MiniRL.low, high: -0.1"),
    ):
        with pytest.raises(ValueError, match=words):
            MiniRL(**knobs)
    with pytest.raises(ValueError, match=r"algo.mode=bypass_ppo: MiniRL needs decoupled"):
        compose(small_config("method=naive", "parts=[minirl.MiniRL]", "algo.mode=bypass_ppo"))
