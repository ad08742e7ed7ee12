"""Losses: what must not change a value or a gradient. Padding, micro-batches, ranks, order, rejected batches."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from harness.loss import AGGREGATIONS, count_totals, policy_loss, start
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


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_padding_changes_nothing(loss: str, bad: float) -> None:
    logp, batch = random_batch("padding")
    algo = Algo(loss=loss, kl_coef=0.1)
    ref = logp.detach() - 0.1
    c = start(batch, 0.2, 0.2)
    value, grad = value_and_gradient(logp, replace(batch, extras={"ref_logp": ref}), c, algo)

    def spoilt(x: Tensor) -> Tensor:
        return torch.where(batch.mask, x.detach(), bad)

    dirty = replace(batch, extras={"ref_logp": spoilt(ref)})
    dirty = replace(dirty, **{n: spoilt(getattr(batch, n)) for n in ("adv", "rollout_logp", "old_logp")})
    c = replace(c, weight=spoilt(c.weight), clip_low=spoilt(c.clip_low), clip_high=spoilt(c.clip_high))
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
