"""IPO: prime-rl's golden tokens, a loop over random ones, the two-sided mask beside DPPO's, and the penalty on all."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch

from methods.dppo import PRIME_RL
from methods.flashrl import TIS
from methods.ipo import IPO, METHOD
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective, updated


@pytest.mark.parametrize(
    ("now", "sampled", "adv", "is_kept", "loss", "slope"),
    [
        (0.5, 0.45, 1.0, True, -1.111100, -1.110900),
        (0.5, 0.61, 1.0, False, 0.000040, -0.000398),
        (0.5, 0.61, -1.0, False, 0.000040, -0.000398),
        (0.02, 0.001, 1.0, True, -19.991026, -19.994009),
        (0.9, 0.79, -1.0, False, 0.000017, 0.000261),
    ],
)
def test_golden_tokens(now: float, sampled: float, adv: float, is_kept: bool, loss: float, slope: float) -> None:
    logp, batch = response([log(now)], old=[-9.0], rollout=[log(sampled)], adv=adv)
    assert updated(METHOD.parts, logp, batch).keep.item() == is_kept
    value, grad = objective(METHOD.parts, logp, batch)
    assert_published(value.item(), loss)
    assert_published(grad.item(), slope)


def test_equals_a_loop() -> None:
    logp, batch = random_batch("ipo", size=(24, 8))
    batch = replace(batch, rollout_logp=batch.rollout_logp.clamp(max=-0.01))
    logp = logp.detach().clamp(max=-0.01).requires_grad_()
    part = IPO(threshold=0.07, tau=1.5, kappa=0.01)
    total, slopes, num_masked = 0.0, torch.zeros_like(logp), 0
    for i, t in batch.mask.nonzero().tolist():
        adv, now, sampled = (x[i, t].item() for x in (batch.adv, logp, batch.rollout_logp))
        is_kept = not abs(exp(now) - exp(sampled)) > 0.07
        num_masked += not is_kept
        total += 0.01 * (now - sampled) ** 2 - is_kept * 1.5 * adv * exp(now - sampled)
        slopes[i, t] = 0.02 * (now - sampled) - is_kept * 1.5 * adv * exp(now - sampled)
    count = int(batch.mask.sum())
    assert 5 < num_masked < count - 5
    value, grad = objective([part], logp, batch)
    assert_exact(value.item(), total / count)
    assert_exact(grad, slopes / count)


def test_the_mask_is_blind_to_the_sign_where_dppo_is_not() -> None:
    logp, batch = random_batch("sign", spread=0.8)
    flipped = replace(batch, adv=-batch.adv)
    keep = updated(METHOD.parts, logp, batch).keep
    assert 0 < keep.sum() < batch.mask.sum() and torch.equal(keep, updated(METHOD.parts, logp, flipped).keep)
    signed = [updated(PRIME_RL.parts, logp, b).keep for b in (batch, flipped)]
    assert not torch.equal(*signed)


def test_the_band_is_closed() -> None:
    logp, batch = response([log(0.5), log(0.5)], old=[-1.0] * 2, rollout=[log(0.25), log(0.25)], adv=1.0)
    shift = float((logp.detach().exp() - batch.rollout_logp.exp()).abs().max())
    assert updated([IPO(threshold=shift)], logp, batch).keep.all()
    assert not updated([IPO(threshold=shift - 1e-9)], logp, batch).keep.any()


def test_neither_the_old_policy_nor_a_weight_nor_the_mode_matters() -> None:
    logp, batch = random_batch("old policy", spread=0.8)
    base = objective(METHOD.parts, logp, batch)
    other_old = replace(batch, old_logp=batch.old_logp + 0.3)
    for parts, b, algo in (
        (METHOD.parts, other_old, Algo()),
        ((TIS(cap=1.1), *METHOD.parts), batch, Algo()),
        (METHOD.parts, replace(batch, old_logp=batch.rollout_logp), Algo(mode="bypass_ppo")),
    ):
        assert all(torch.equal(x, y) for x, y in zip(objective(parts, logp, b, algo), base, strict=True))


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"IPO.threshold, tau: 0.0, 1.0"):
        IPO(threshold=0.0)
    with pytest.raises(ValueError, match=r"^IPO.threshold, tau: 0.1, -1.0 \(choose above 0\)$"):
        IPO(tau=-1.0)
    with pytest.raises(ValueError, match=r"IPO.kappa: -1"):
        IPO(kappa=-1.0)
