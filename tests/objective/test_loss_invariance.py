"""Losses: what must not change a value or a gradient. Padding, micro-batches, ranks, order, rejected batches."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from harness.numerics.logprobs import selected_logp
from harness.objective.advantage import KINDS, group_advantage, informative_groups, overlong_penalty
from harness.objective.loss import AGGREGATIONS, KL_KINDS, batch_normalize, count_totals, policy_loss, start
from harness.objective.mismatch import by_entropy, by_position, correction_metrics, mismatch_metrics
from methods import METHODS
from tests.loss_cases import Algo, assert_exact, random_batch, rows_of, value_and_gradient


def test_constants_have_no_gradient() -> None:
    logp, batch = random_batch("constants")
    names = ("adv", "rollout_logp", "old_logp")
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in names}
    batch = replace(batch, **leaves)
    for loss in ("ppo", "gspo", "cispo", "reinforce"):
        c = start(batch, 0.2, 0.2)
        weight = c.weight.clone().requires_grad_()
        totals = count_totals(batch.mask, c.keep, 7)
        value, sums = policy_loss(logp, batch, replace(c, weight=weight), totals, Algo(loss=loss))
        grads = torch.autograd.grad(value, [logp, *leaves.values(), weight], allow_unused=True)
        assert grads[0].abs().sum() > 0 and grads[1:] == (None, None, None, None)
        assert not any(s.requires_grad for s in sums.values())


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_padding_and_splits_do_not_reach_the_kl(kind: str, loss: str) -> None:
    logp, batch = random_batch("kl", size=(8, 7))
    algo = Algo(loss=loss, kl_coef=0.4, kl_type=kind, agg="seq-mean-token-mean")
    c = start(batch, 0.2, 0.2)
    ref = logp.detach() - 0.3 * torch.cos(batch.rollout_logp)
    whole = replace(batch, extras={"ref_logp": ref})
    value, grad = value_and_gradient(logp, whole, c, algo)
    fields = {n: torch.where(batch.mask, getattr(batch, n), nan) for n in ("adv", "rollout_logp", "old_logp")}
    dirty = replace(batch, **fields, extras={"ref_logp": torch.where(batch.mask, ref, nan)})
    same, same_grad = value_and_gradient(torch.where(batch.mask, logp.detach(), nan).requires_grad_(), dirty, c, algo)
    assert torch.equal(same, value) and torch.equal(same_grad, grad)
    totals = count_totals(batch.mask, c.keep, 7)
    pieces = [rows_of(whole, c, slice(first, first + 3)) for first in (0, 3, 6)]
    parts = [
        policy_loss(logp[i : i + 3], b, some, totals, algo)[0] for i, (b, some) in zip((0, 3, 6), pieces, strict=True)
    ]
    total = torch.stack(parts).sum()
    assert_exact(total.detach(), value)
    assert_exact(torch.autograd.grad(total, logp)[0], grad)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_padding_changes_nothing(loss: str, bad: float) -> None:
    logp, batch = random_batch("padding")
    algo = Algo(loss=loss, kl_coef=0.1)
    ref = logp.detach() - 0.1
    c = replace(start(batch, 0.2, 0.2), adv_shift=0.3 * torch.sin(batch.rollout_logp))
    value, grad = value_and_gradient(logp, replace(batch, extras={"ref_logp": ref}), c, algo)

    def spoilt(x: Tensor) -> Tensor:
        return torch.where(batch.mask, x.detach(), bad)

    dirty = replace(batch, extras={"ref_logp": spoilt(ref)})
    dirty = replace(dirty, **{n: spoilt(getattr(batch, n)) for n in ("adv", "rollout_logp", "old_logp")})
    assert c.adv_shift is not None
    c = replace(c, weight=spoilt(c.weight), clip_low=spoilt(c.clip_low), clip_high=spoilt(c.clip_high))
    c = replace(c, adv_shift=spoilt(c.adv_shift))
    same, same_grad = value_and_gradient(spoilt(logp).requires_grad_(), dirty, c, algo)
    assert torch.equal(same, value) and torch.equal(same_grad, grad)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_invalid_rollout_logp_drops_the_token_and_invalid_trainer_logp_shows(loss: str) -> None:
    logp, batch = random_batch("invalid")
    broken = batch.rollout_logp.clone()
    broken[0, 2] = nan
    for mode, old in (("decoupled", batch.old_logp), ("bypass_ppo", broken)):
        dirty, algo = replace(batch, rollout_logp=broken, old_logp=old), Algo(mode=mode, loss=loss)
        c = start(dirty, 0.2, 0.2)
        assert not c.keep[0, 2] and int(c.keep.sum()) == int(batch.mask.sum()) - 1
        value, sums = policy_loss(logp, dirty, c, count_totals(batch.mask, c.keep, 7), algo)
        (grad,) = torch.autograd.grad(value, logp)
        assert torch.isfinite(value) and torch.isfinite(grad).all() and grad[0, 2] == 0
        assert all(torch.isfinite(total) for total in sums.values())
        assert sums["tokens"] == batch.mask.sum() - 1
    spoilt = logp.detach().clone()
    spoilt[0, 2] = nan
    assert value_and_gradient(spoilt.requires_grad_(), batch, start(batch, 0.2, 0.2), Algo())[0].isnan()


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("denom", ["original", "kept"])
def test_splits_permutations_and_ranks_change_nothing(agg: str, denom: str) -> None:
    logp, batch = random_batch("split", size=(8, 7))
    algo = Algo(agg=agg, denom=denom)
    c = start(batch, 0.2, 0.2)
    c = replace(c, keep=c.keep & (batch.rollout_logp < -1.0), weight=(batch.old_logp - batch.rollout_logp).exp())
    c = replace(c, adv_shift=0.3 * torch.sin(batch.rollout_logp))
    totals = count_totals(batch.mask, c.keep, 11)
    loss, grad = value_and_gradient(logp, batch, c, algo, totals)

    def in_pieces(pieces: tuple[Tensor, ...], ranks: int) -> tuple[Tensor, Tensor]:
        shared, values = replace(totals, dp_size=ranks), []
        for rows in pieces:
            b, some = rows_of(batch, c, rows)
            values.append(policy_loss(logp[rows], b, some, shared, algo)[0])
        total = torch.stack(values).sum() / ranks
        return total.detach(), torch.autograd.grad(total, logp)[0]

    order = torch.tensor([3, 7, 1, 0, 6, 2, 5, 4])
    for pieces, ranks in ((order.split(8), 1), (order.split(3), 1), (torch.arange(8).split(1), 1), (order.split(4), 2)):
        other, other_grad = in_pieces(pieces, ranks)
        assert_exact(other, loss)
        assert_exact(other_grad, grad)


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("denom", ["original", "kept"])
def test_nothing_kept_gives_zero_connected_to_the_graph(agg: str, denom: str) -> None:
    logp, batch = random_batch("rejected")
    for mask in (batch.mask, torch.zeros_like(batch.mask)):
        b = replace(batch, mask=mask)
        c = replace(start(b, 0.2, 0.2), keep=torch.zeros_like(mask))
        loss, grad = value_and_gradient(logp, b, c, Algo(agg=agg, denom=denom))
        assert loss == 0 and torch.equal(grad, torch.zeros_like(grad))


def test_every_tensor_is_made_on_the_device_of_the_arguments() -> None:
    """With another default device, a tensor made without naming one cannot meet the arguments."""
    logp, batch = random_batch("device", dtype=torch.float32)
    batch = replace(batch, extras={"ref_logp": batch.old_logp})
    logits, ids = torch.zeros(5, 7, requires_grad=True), torch.zeros(5, dtype=torch.int64)
    scores, group = torch.arange(6.0), torch.tensor([0, 0, 1, 1, 2, 2])
    with torch.device("meta"):
        for loss in ("ppo", "gspo", "cispo", "reinforce"):
            for agg in AGGREGATIONS:
                c = start(batch, 0.2, 0.2)
                for method in METHODS.values():
                    for part in method.parts:
                        c = part.correct(c, batch, {})
                c = replace(c, weight=batch_normalize(c.weight, batch.mask, "sequence"))
                algo = Algo(loss=loss, agg=agg, kl_coef=0.1, kl_type="k3")
                value_and_gradient(logp, batch, c, algo)
        correction_metrics(c, batch.mask)
        mismatch_metrics(batch.old_logp, batch.rollout_logp, batch.mask, cap=2.0, entropy=-batch.old_logp)
        by_position(batch.old_logp, batch.rollout_logp, batch.mask)
        by_entropy(batch.old_logp, batch.rollout_logp, batch.mask, -batch.old_logp)
        for chunk in (None, 2):
            selected_logp(logits, ids, 0.5, chunk=chunk)[0].sum().backward()
        for kind in KINDS:
            assert group_advantage(scores, group, kind, 1e-6).device.type == "cpu"
        assert informative_groups(scores, group).all() and overlong_penalty(group, 4, 2).device.type == "cpu"
