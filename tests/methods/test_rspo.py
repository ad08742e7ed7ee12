"""RSPO: golden values of the shift and the geometric mean, a loop over random tokens, routers that move."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from harness.api import Sequences, Step
from harness.foundation.clock import Clock
from harness.models.decoder import ROUTER
from harness.run.checks import check
from harness.run.collect import collect
from harness.run.loop import grpo_step, push_weights
from harness.run.run import Run
from harness.trainers.local.forward import Routers
from harness.trainers.local.trainer import LocalTrainer
from methods.rspo import RSPO, Place, geometric_mean, shift_factor
from tests.loss_cases import Algo, assert_exact, assert_published, random_batch, response
from tests.objective_cases import objective
from tests.toy import MIXTURE, small_config, small_run

MEANS = Algo(agg="seq-mean-token-mean")


def of_two(adv: float, gammas: list[float], part: RSPO) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the response whose ratios to the power of the advantage's sign are 1.1 and 0.9."""
    logp, batch = response([-1 + adv * log(1.1), -1 + adv * log(0.9)], old=[-1.0, -1.0], rollout=[-1.0, -1.0], adv=adv)
    shift = torch.tensor([[-log(g) for g in gammas]], dtype=logp.dtype)
    return objective([part], logp, replace(batch, extras={"router_shift": shift}), MEANS)


def test_golden_shift() -> None:
    """Two layers, two experts each, by the trainer's own mean."""
    old = torch.tensor([[[[0.5, 0.3], [0.6, 0.2]]]]).log()
    now = torch.tensor([[[[0.4, 0.3], [0.6, 0.25]]]]).log()
    ids = torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    trainer = SimpleNamespace(routers=lambda seqs, ids: Routers(ids=ids, logp=now))
    seqs = cast(Sequences, SimpleNamespace(sampled=torch.ones(1, 1, dtype=torch.bool)))
    shift = LocalTrainer.router_shift(cast(Any, trainer), seqs, Routers(ids=ids, logp=old))
    assert_published(shift, torch.tensor([[0.111572]]))
    assert_published(shift_factor(shift, 0.7), torch.tensor([[0.894427]]))
    assert_published(shift_factor(torch.tensor([[0.0, 0.3, 2.0]]), 0.7), torch.tensor([[1.0, exp(-0.3), 0.7]]))


def test_golden_geometric_mean() -> None:
    """For A > 0 the place of the factor is the same; for A < 0 it enlarges S outside the clip, shrinks it inside."""
    assert_published(of_two(-1.0, [1.0, 1.0], RSPO())[0].item(), 1 / 0.994987)
    assert_published(of_two(1.0, [1.0, 1.0], RSPO())[0].item(), -0.994987)
    places: list[tuple[Place, float]] = [("ratio", (0.95 * 0.85 / 0.99) ** 0.5), ("clipped", 1.118436)]
    for place, negative in places:
        part = RSPO(place=place)
        assert_published(of_two(1.0, [0.95, 0.85], part)[0].item(), -0.894106)
        loss, grad = of_two(-1.0, [0.95, 0.85], part)
        assert_published(loss.item(), negative)
        assert_exact(grad, loss / 2 * torch.ones_like(grad))  # S / |o| for each token


def test_the_bound_cuts_the_gradient_of_a_token_in_the_direction_of_its_advantage() -> None:
    log_r = torch.tensor([[0.5, -0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    for sign, mean, live in ((1.0, (0.4 - 0.5 + 0.1) / 3, [0, 1, 1]), (-1.0, (0.5 - 0.4 + 0.1) / 3, [1, 0, 1])):
        s = geometric_mean(log_r, zero, torch.full_like(zero, sign), mask, bound=0.4, place="ratio")
        (grad,) = torch.autograd.grad(s.sum(), log_r)
        assert_exact(s.detach(), torch.full_like(zero, exp(mean)))
        assert_exact(grad, exp(mean) * torch.tensor([live], dtype=torch.float64))
    moved = geometric_mean(log_r, zero - 0.2, torch.ones_like(zero), mask, bound=0.4, place="ratio")
    assert_exact(moved.detach(), torch.full_like(zero, exp((0.3 - 0.7 - 0.1) / 3)))  # 0.5 - 0.2 is inside again
    moved = geometric_mean(log_r, zero - 0.2, torch.ones_like(zero), mask, bound=0.4, place="clipped")
    assert_exact(moved.detach(), torch.full_like(zero, exp((0.2 - 0.7 - 0.1) / 3)))


@pytest.mark.parametrize("place", ["ratio", "clipped"])
def test_equals_a_loop(place: Any) -> None:
    logp, batch = random_batch("rspo", size=(12, 8), spread=0.8)
    adv = batch.adv[:, :1].expand_as(batch.adv)
    shift = 0.2 * torch.rand(logp.shape, generator=torch.Generator().manual_seed(1), dtype=logp.dtype)
    batch = replace(batch, adv=adv, extras={"router_shift": shift})
    total, rows = torch.zeros((), dtype=logp.dtype), [i for i in range(12) if batch.mask[i].any()]
    for i in rows:
        s, product, n = float(adv[i, 0].sign()), torch.ones((), dtype=logp.dtype), int(batch.mask[i].sum())
        for t in batch.mask[i].nonzero().flatten().tolist():
            gamma, ratio = max(0.7, exp(-float(shift[i, t]))), (logp[i, t] - batch.old_logp[i, t]).exp()
            inside = (gamma * ratio) ** s if place == "ratio" else ratio**s
            product = product * inside.clamp(max=exp(0.4)) * (1.0 if place == "ratio" else gamma)
        total = total - product ** (s / n) * adv[i, 0] / len(rows)
    value, grad = objective([RSPO(place=place)], logp, batch, MEANS)
    assert_exact(value, total.detach())
    assert_exact(grad, torch.autograd.grad(total, logp)[0])


def test_the_factor_has_no_gradient_and_its_floor_holds() -> None:
    near, far = of_two(1.0, [0.7, 0.7], RSPO()), of_two(1.0, [0.1, 0.1], RSPO())
    assert_exact(near[0], far[0])
    assert_exact(near[1], far[1])
    assert of_two(1.0, [0.1, 0.1], RSPO(gamma_min=0.5))[0].item() == pytest.approx(-0.5 * 0.994987, abs=1e-6)
    for wrong, name in (({"bound": 0.0}, "bound"), ({"gamma_min": 1.5}, "gamma_min")):
        with pytest.raises(ValueError, match=rf"^RSPO\.{name}: "):
            RSPO(**cast(Any, wrong))


@pytest.mark.parametrize("launch", [{}, {"packing": True}, {"micro_batch_tokens": 64}])
def test_router_log_probs_are_those_of_a_plain_forward_pass(launch: dict[str, Any], moe_folder: Path) -> None:
    run = small_run(moe_folder, [*MIXTURE, "method=rspo", "precision=int4"], **launch)
    first = Step(index=0, total=4, seed=0)
    push_weights(run, first)
    seqs = collect(run, first, Clock("cpu")).seqs
    found = run.trainer.routers(seqs)
    logits: list[Tensor] = []
    hooks = [
        layer.get_submodule(ROUTER).register_forward_hook(lambda *call: logits.append(call[2]))
        for layer in run.trainer.model.model.layers
    ]
    with torch.no_grad():
        run.trainer.model(seqs.ids)
    for hook in hooks:
        hook.remove()
    assert isinstance(seqs.prompt_lens, int)
    num = 0
    for layer in range(2):
        rows = logits[layer].view(*seqs.ids.shape, -1).log_softmax(-1)
        for t in range(seqs.token_ids.shape[1]):
            some = seqs.sampled[:, t]
            at = rows[:, seqs.prompt_lens + t - 1][some]
            best = at.topk(2).indices
            assert torch.equal(found.ids[:, t, layer][some].sort(-1).values, best.sort(-1).values)
            ours = found.logp[:, t, layer][some]
            torch.testing.assert_close(ours, at.gather(-1, found.ids[:, t, layer][some]), rtol=0, atol=2e-5)
            num += len(at)
    assert num > 400 and run.trainer.router_shift(seqs, found).abs().max() < 1e-5


def test_routers_move_with_updates_and_a_step_says_how_far(moe_folder: Path) -> None:
    """Each update is a function of the shift: with the floor at 1 it is the method without routers."""
    rows: dict[str, dict[str, float]] = {}
    for rate in ("1e-9", "0.001", "0.01"):
        run = small_run(
            moe_folder, [*MIXTURE, "method=rspo", "precision=int4", "algo.num_minibatches=4", f"trainer.lr={rate}"]
        )
        rows[rate] = grpo_step(run)
    assert rows["1e-9"]["train/router_shift"] < 1e-5
    assert 1e-4 < rows["0.001"]["train/router_shift"] < 0.5 * rows["0.01"]["train/router_shift"]


def moved(run: Run) -> Tensor:
    before = torch.cat([p.detach().flatten().clone() for p in run.trainer.parameters])
    grpo_step(run)
    return torch.cat([p.detach().flatten() for p in run.trainer.parameters]) - before


def test_the_factor_changes_updates_after_the_first(moe_folder: Path) -> None:
    options = [*MIXTURE, "method=rspo", "precision=int4", "trainer.lr=0.01"]
    for updates, is_same in ((1, True), (4, False)):
        own, none = (
            moved(small_run(moe_folder, [*options, f"algo.num_minibatches={updates}", f"knobs.RSPO.gamma_min={floor}"]))
            for floor in (0.5, 1.0)
        )
        assert ((own - none).abs().max() < 1e-4) == is_same
        assert own.abs().max() > 1e-3


def test_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"^method=rspo model=xs: .* such as model=moe_xs$"):
        check(small_config("method=rspo"))
    with pytest.raises(ValueError, match="bypass_ppo"):
        check(small_config("method=rspo", *MIXTURE, "algo.mode=bypass_ppo"))
    with pytest.raises(ValueError, match=r"trainer=verl: RSPO needs router_shift; verl's workers offer ref_logp"):
        check(small_config("method=rspo", *MIXTURE, "trainer=verl", "engine=vllm", "trainer.device=cuda"))
