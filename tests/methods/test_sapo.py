"""SAPO: the gate's golden values and slopes, a loop over random tokens, PPO's gradient where nothing has moved."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch

from harness.config.compose import compose
from methods.flashrl import TIS
from methods.sapo import METHOD, SAPO, gated
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective
from tests.toy import small_config

MEANS = Algo(agg="seq-mean-token-mean")


@pytest.mark.parametrize(
    ("tau", "ratio", "value", "weight"),
    [
        (1.0, 0.5, 1.510163, 0.470007),
        (1.0, 1.0, 2.0, 1.0),
        (1.0, 1.2, 2.199336, 1.188080),
        (1.0, 2.0, 2.924234, 1.572895),
        (1.05, 0.5, 1.415938, 0.467070),
        (1.05, 1.0, 1.904762, 1.0),
        (1.05, 1.2, 2.104030, 1.186867),
        (1.05, 2.0, 2.822000, 1.536220),
    ],
)
def test_golden_gate(tau: float, ratio: float, value: float, weight: float) -> None:
    """f(r), and the weight of the policy gradient, 4 p (1 - p) r. Positive advantages have tau 1, others 1.05."""
    for adv in (0.7, 2.0):
        signed = adv if tau == 1.0 else -adv
        logp, batch = response([-1.0 + log(ratio)], old=[-1.0], rollout=[-1.0], adv=signed)
        loss, grad = objective(METHOD.parts, logp, batch, MEANS)
        torch.testing.assert_close(loss.item(), -signed * value, rtol=0, atol=2e-6)
        torch.testing.assert_close(grad.item(), -signed * weight, rtol=0, atol=2e-6)


def test_at_ratio_1_the_gradient_is_that_of_ppo_for_every_tau() -> None:
    logp, batch = random_batch("on policy")
    batch = replace(batch, old_logp=logp.detach())
    plain = objective([], logp, batch, replace(MEANS, dual_clip=None))[1]
    for tau in (0.3, 1.0, 4.0):
        assert_exact(objective([SAPO(tau_pos=tau, tau_neg=tau)], logp, batch, MEANS)[1], plain)


def test_the_gate_is_bounded_and_steeper_for_larger_tau() -> None:
    ratio = torch.linspace(0, 60, 4001, dtype=torch.float64).requires_grad_()
    weights: list[torch.Tensor] = []
    for tau in (0.5, 1.0, 2.0):
        f = gated(ratio, torch.full_like(ratio, tau))
        (slope,) = torch.autograd.grad(f.sum(), ratio)
        weights.append(slope)
        assert (f <= 4 / tau).all() and (f >= 0).all() and abs(float(slope.max()) - 1) < 1e-3
        assert abs(float(ratio.detach()[slope.argmax()]) - 1) < 0.02
    away = ((ratio - 1).abs() > 0.02) & (ratio < 8)
    assert (weights[0][away] > weights[1][away]).all() and (weights[1][away] > weights[2][away]).all()


def test_an_advantage_of_zero_takes_tau_neg_and_far_ratios_stay_finite() -> None:
    logp, batch = response([-1.0, -30.0, -0.1], old=[-1.0, -0.1, -60.0], rollout=[-1.0] * 3, adv=[0.0, 1.0, -1.0])
    loss, grad = objective(METHOD.parts, logp, batch, MEANS)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and grad[0, 0] == 0
    part = SAPO(tau_pos=1.0, tau_neg=3.0)
    for adv, tau in ((1e-12, 1.0), (0.0, 3.0), (-1e-12, 3.0)):
        moved, one = response([-0.5], old=[-1.0], rollout=[-1.0], adv=adv)
        shifted = replace(one, adv=one.adv)
        found = part.token_loss(moved, None, shifted)  # type: ignore[arg-type]
        assert_published(found.item(), -adv * float(gated(torch.tensor(exp(0.5)), torch.tensor(tau))))


def test_weights_and_masks_multiply_after_the_gate() -> None:
    logp, batch = random_batch("weight", spread=0.8)
    alone, weighted = (objective(parts, logp, batch, MEANS)[1] for parts in (METHOD.parts, (TIS(), *METHOD.parts)))
    weight = (batch.old_logp - batch.rollout_logp).exp().clamp(max=2.0)
    assert_exact(weighted[batch.mask], (alone * weight)[batch.mask])


def test_refusals() -> None:
    for knobs in ({"tau_pos": 0.0}, {"tau_neg": -1.0}):
        with pytest.raises(ValueError, match=r"SAPO.tau_pos, tau_neg"):
            SAPO(**knobs)
    with pytest.raises(ValueError, match=r"algo.mode=bypass_pg: SAPO needs decoupled or bypass_ppo"):
        compose(small_config("method=naive", "parts=[sapo.SAPO]", "algo.mode=bypass_pg"))
