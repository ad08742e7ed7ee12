"""AReaL's interpolated proximal policy: golden values, a loop, the synchronous case, real runs with mixed versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.foundation.provenance import tensors_hash
from harness.objective.loss import start
from harness.run.checks import check
from harness.run.loop import grpo_step
from methods.areal_prox import METHOD, decoupled, proximal, share
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective
from tests.toy import small_config, small_run

BYPASS = Algo(mode="bypass_ppo", dual_clip=None)


def test_golden_interpolation() -> None:
    a = share(torch.tensor([[2, 4, 5, 0]]), 5)
    assert_published(a, torch.tensor([[0.666667, 0.0, 0.0, 0.8]], dtype=torch.float64))
    prox = proximal(torch.full((1, 2), -1.0), torch.full((1, 2), -2.0), a[:, :2])
    assert_published(prox, torch.tensor([[-1.333333, -2.0]]))


def test_golden_objective() -> None:
    """Two versions in a response: the weight is prox over mu, the clip acts on current over prox."""
    mu, prox = [-1.0, -1.0, -2.0, -2.0], torch.tensor([[-1.1, -0.9, -2.0, -1.0]], dtype=torch.float64)
    logp, batch = response([-1.05, -0.9, -1.7, -1.0], old=mu, rollout=mu, adv=1.0)
    c = start(batch, 0.2, 0.2)
    found = decoupled(logp, prox, batch.rollout_logp, batch.adv, c)
    assert_published(-found.detach(), torch.tensor([[0.951229, 1.105171, 1.2, 2.718282]], dtype=torch.float64))
    (grad,) = torch.autograd.grad(found.sum(), logp)
    assert_published(-grad, torch.tensor([[0.951229, 1.105171, 0.0, 2.718282]], dtype=torch.float64))


def test_equals_a_loop() -> None:
    logp, batch = random_batch("areal", size=(10, 7), spread=0.5)
    step = replace(batch.step, index=6)
    age = torch.randint(0, 5, logp.shape, generator=torch.Generator().manual_seed(2))
    batch = replace(batch, step=step, version=6 - age)
    total, num = torch.zeros((), dtype=logp.dtype), int(batch.mask.sum())
    for i, t in batch.mask.nonzero().tolist():
        now, mu, adv = logp[i, t], batch.rollout_logp[i, t], batch.adv[i, t]
        a = int(age[i, t]) / (int(age[i, t]) + 1)
        prox = mu + a * (now.detach() - mu)
        ratio = (now - prox).exp()
        total = total + torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)) * (prox - mu).exp() / num
    value, grad = objective(METHOD.parts, logp, batch, BYPASS)
    assert_exact(value, total.detach())
    assert_exact(grad, torch.autograd.grad(total, logp)[0])


def test_the_newest_tokens_have_ppo_against_the_sampler_and_old_ones_its_weight() -> None:
    logp, batch = random_batch("areal ends", size=(8, 6), spread=0.5)
    fresh = replace(batch, version=torch.full(logp.shape, batch.step.index))
    plain = replace(batch, old_logp=batch.rollout_logp)
    for found, expected in zip(
        objective(METHOD.parts, logp, fresh, BYPASS), objective((), logp, plain, BYPASS), strict=True
    ):
        assert_exact(found, expected)
    ancient = replace(batch, version=torch.full(logp.shape, -(10**9)))
    weights = (logp - batch.rollout_logp).exp() * batch.adv / batch.mask.sum()
    torch.testing.assert_close(
        objective(METHOD.parts, logp, ancient, BYPASS)[1],
        -torch.where(batch.mask, weights.detach(), 0.0),
        rtol=1e-6,
        atol=1e-8,
    )


def test_a_run_with_several_versions_differs_from_bypass_and_a_synchronous_one_does_not(tmp_path: Path) -> None:
    words = ["precision=int4", "trainer.lr=0.003", "algo.mode=bypass_ppo", "algo.dual_clip=null"]
    for more, is_same in (([], True), (["algo.partial_rollouts=3"], False)):
        hashes: list[str] = []
        for method in ("areal_prox", "naive"):
            run = small_run(tmp_path, [f"method={method}", *words, *more])
            for _ in range(3):
                grpo_step(run)
                run.step += 1
            hashes.append(tensors_hash(run.trainer.weights()))
        assert (hashes[0] == hashes[1]) == is_same


def test_where_it_cannot_work() -> None:
    assert METHOD.mode == "bypass_ppo"
    with pytest.raises(ValueError, match="bypass_pg"):
        check(small_config("method=areal_prox", "algo.mode=bypass_pg"))
    with pytest.raises(
        ValueError, match=r"trainer=verl: InterpolatedProx needs version; verl's workers offer ref_logp"
    ):
        check(small_config("method=areal_prox", "trainer=verl", "engine=vllm", "trainer.device=cuda"))
