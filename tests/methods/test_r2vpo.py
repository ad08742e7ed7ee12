"""R2VPO: golden objectives and slopes of the penalty, its multiplier, unclipped PPO without it, and its anchors."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from harness.api import Memory
from harness.config.compose import advice, compose
from harness.objective.loss import start
from harness.run.loop import grpo_step
from methods.dc_grpo import next_multiplier
from methods.flashrl import TIS
from methods.r2vpo import METHOD, R2VPO
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective, updated
from tests.toy import small_config, small_run


@pytest.mark.parametrize(
    ("ratio", "adv", "gain", "slope"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.2, 1.0, 1.16, 0.72),
        (1.2, -1.0, -1.24, -1.68),
        (0.8, 1.0, 0.76, 1.12),
        (1.5, 1.0, 1.25, 0.0),
    ],
)
def test_golden_objectives_and_slopes(ratio: float, adv: float, gain: float, slope: float) -> None:
    """J without the constant lam delta, and dJ / dlogp; the shift gives the same slope by another value."""
    logp, batch = response([log(ratio) - 1.0], old=[-1.0], rollout=[-1.0], adv=adv)
    direct = (logp + 1.0).exp() * adv - ((logp + 1.0).exp() - 1.0).square()
    assert_published(direct.item(), gain)
    assert_published(torch.autograd.grad(direct.sum(), logp)[0].item(), slope)
    value, grad = objective([R2VPO(lam=1.0)], logp, batch)
    assert_published(grad.item(), -slope)
    assert_published(value.item(), -ratio * (adv - 2.0 * (ratio - 1.0)))


def test_golden_multiplier() -> None:
    ratios = [1.0, 1.2, 0.9, 1.1]
    logp, batch = response([log(r) - 1.0 for r in ratios], old=[-1.0] * 4, rollout=[-1.0] * 4, adv=1.0)
    memory: Memory = {}
    part = R2VPO(lam=1.0, delta=0.01, eta=1.0)
    part.correct_update(start(batch, 0.2, 0.2), logp.detach(), batch, memory)
    assert memory == pytest.approx({"variance": 0.015, "lam": 1.005})
    assert next_multiplier(0.004, 0.0, 0.01, 1.0) == 0.0


def test_the_update_has_the_multiplier_from_before() -> None:
    logp, batch = random_batch("before")
    memory: Memory = {}
    part, c = R2VPO(lam=0.5, eta=3.0), start(batch, 0.2, 0.2)
    excess = torch.where(batch.mask, (logp.detach() - batch.old_logp).exp() - 1.0, 0.0)
    variance = float(excess.square().sum() / batch.mask.sum())
    for lam in (0.5, 0.5 + 3.0 * (variance - 0.01), 0.5 + 6.0 * (variance - 0.01)):
        shift = part.correct_update(c, logp.detach(), batch, memory).adv_shift
        assert shift is not None
        assert_exact(shift, -2.0 * lam * excess)


def test_equals_autograd_of_the_penalised_objective() -> None:
    logp, batch = random_batch("r2vpo", size=(12, 8), spread=0.8)
    ratio = (logp - batch.old_logp).exp()
    weight = (batch.old_logp - batch.rollout_logp).exp().clamp(max=2.0)
    gain = weight * (ratio * batch.adv - 0.7 * (ratio - 1.0).square())
    (expected,) = torch.autograd.grad(-torch.where(batch.mask, gain, 0.0).sum() / batch.mask.sum(), logp)
    assert_exact(objective([TIS(), R2VPO(lam=0.7)], logp, batch)[1], expected)


def test_lam_0_is_ppo_without_a_clip_and_an_unchanged_policy_is_left_alone() -> None:
    logp, batch = random_batch("lam 0")
    wide = Algo(eps_low=1.0, eps_high=1e9, dual_clip=None)
    for a, b in zip(objective([R2VPO(lam=0.0, eta=0.0)], logp, batch), objective([], logp, batch, wide), strict=True):
        assert_exact(a, b)
    same, memory = replace(batch, old_logp=logp.detach()), Memory()
    c = R2VPO().correct_update(start(same, 0.2, 0.2), logp.detach(), same, memory)
    assert c.adv_shift is not None and (c.adv_shift == 0).all() and memory["lam"] == pytest.approx(0.99)
    assert torch.equal(updated(METHOD.parts, logp, batch).keep, batch.mask)  # never a mask


def test_the_rollout_as_anchor_has_the_mismatch_in_the_ratio() -> None:
    logp, batch = random_batch("anchor", spread=0.5)
    part = R2VPO(anchor="rollout")
    sampler = replace(batch, old_logp=batch.rollout_logp)
    assert_exact(objective([part], logp, batch)[1], objective([R2VPO()], logp, sampler)[1])
    assert torch.equal(objective([TIS(), part], logp, batch)[1], objective([part], logp, batch)[1])
    assert not torch.equal(objective([TIS(), R2VPO()], logp, batch)[1], objective([R2VPO()], logp, batch)[1])
    assert part.modes == () and R2VPO().modes == ("decoupled",)


def test_nothing_valid_leaves_the_multiplier_alone() -> None:
    logp, batch = random_batch("empty")
    memory: Memory = {}
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    R2VPO().correct_update(start(nothing, 0.2, 0.2), logp.detach(), nothing, memory)
    assert memory == {}


def test_the_multiplier_of_a_run(tmp_path: Path) -> None:
    """One update a batch has no variance; later updates of a batch do."""
    run = small_run(tmp_path, ["method=r2vpo", "precision=int3"])
    for lam in (0.99, 0.98):
        row = grpo_step(run)
        run.step += 1
        assert row["part/R2VPO.variance"] < 1e-9 and row["part/R2VPO.lam"] == pytest.approx(lam, abs=1e-6)
    row = grpo_step(small_run(tmp_path, ["method=r2vpo", "precision=int3", "algo.num_epochs=3"]))
    assert row["part/R2VPO.variance"] > 0.001
    assert row["part/R2VPO.lam"] > 1.0 - 3 * 0.01 + row["part/R2VPO.variance"]
    single = compose(small_config("method=r2vpo", "precision=int3"))
    assert any("R2VPO changes nothing below 2 updates" in line for line in advice(small_config(), single))
    sampler = compose(small_config("method=r2vpo", "precision=int3", "knobs.R2VPO.anchor=rollout"))
    assert advice(small_config(), sampler) == []
    row = grpo_step(small_run(tmp_path, ["method=r2vpo", "precision=int3", "knobs.R2VPO.anchor=rollout"]))
    assert row["part/R2VPO.variance"] > 0.001  # of one update: the mismatch


def test_refusals() -> None:
    for knobs, words in (({"lam": -1.0}, "lam: -1"), ({"delta": -0.1}, "delta: -0.1"), ({"eta": -1.0}, "eta: -1")):
        with pytest.raises(ValueError, match=rf"R2VPO.{words}"):
            R2VPO(**knobs)
    with pytest.raises(ValueError, match=r"algo.mode=bypass_ppo: R2VPO needs decoupled"):
        compose(small_config("method=naive", "parts=[r2vpo.R2VPO]", "algo.mode=bypass_ppo"))
