"""slime's mismatch example: golden weights, mask and losses, its order of operations, and what three divisors give."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch

from methods.flashrl import TIS
from methods.mis import MIS
from methods.slime_mismatch import METHOD
from tests.loss_cases import Algo, assert_exact, assert_published, corrected, random_batch, response
from tests.objective_cases import objective

MEANS = Algo(agg="seq-mean-token-mean", mode="bypass_pg")
"""Losses -A logp weight: with log-probs of -1 and advantages of 1 every token's term is its weight."""


def golden(rho: list[float], more: list[float] | None = None):
    """(current log-probs, batch) of one or two responses with these ratios; each token's own loss is 1."""
    width = len(rho)
    logp, batch = response([-1.0] * width, old=[-1.0] * width, rollout=[-1.0 - log(x) for x in rho], adv=1.0)
    if more is None:
        return logp, batch
    rest = [1.0] * (width - len(more))
    _, second = response([-1.0] * width, old=[-1.0] * width, rollout=[-1.0 - log(x) for x in more + rest], adv=1.0)
    fields = ("token_ids", "mask", "adv", "rollout_logp", "old_logp")
    both = replace(batch, **{name: torch.cat([getattr(batch, name), getattr(second, name)]) for name in fields})
    both.mask[1, len(more) :] = False
    return logp.detach().repeat(2, 1).requires_grad_(), both


def test_golden_weights_mask_and_losses() -> None:
    logp, batch = golden([0.4, 1.0, 1.5, 3.0])
    c = corrected(METHOD.parts, batch)
    weights = torch.tensor([[0.326531, 0.816327, 1.224490, 1.632653]], dtype=torch.float64)
    assert_published(c.weight, weights)
    assert c.keep.tolist() == [[False, True, True, False]]
    assert_published(corrected([TIS(cap=2.0)], batch).weight.mean().item(), 1.225)
    for denom, loss in (("kept", 1.020408), ("original", 0.510204)):
        value, grad = objective(METHOD.parts, logp, batch, replace(MEANS, denom=denom))
        assert_published(value.item(), loss)
        divisor = 2 if denom == "kept" else 4
        assert_published(grad, torch.where(c.keep, -weights / divisor, 0.0))


def test_a_response_without_a_kept_token_and_the_divisor_that_is_left_out() -> None:
    """slime counts the emptied response in the outer mean: half of what "kept" gives here."""
    logp, batch = golden([0.4, 1.0, 1.5, 3.0], [0.1, 0.1])
    c = corrected(METHOD.parts, batch)
    assert_published(corrected([TIS(cap=2.0)], batch).weight[batch.mask].mean().item(), 0.85)
    assert_published(c.weight[c.keep], torch.tensor([1.176471, 1.764706], dtype=torch.float64))
    found = {d: objective(METHOD.parts, logp, batch, replace(MEANS, denom=d))[0].item() for d in ("kept", "original")}
    assert_published(found["kept"], 1.470588)
    assert_published(found["original"], 0.367647)
    assert_published(found["kept"] / 2, 0.735294)


@pytest.mark.parametrize(("log_ratio", "is_kept"), [(-9.21, True), (-9.2104, False), (-25.0, False)])
def test_the_veto_takes_the_whole_response(log_ratio: float, is_kept: bool) -> None:
    _, batch = response([-1.0, -1.0], old=[-1.0, -1.0], rollout=[-1.0 - log_ratio, -1.0], adv=1.0)
    assert corrected(METHOD.parts, batch).keep.tolist() == [[False, is_kept]]


def test_bounds_are_inclusive() -> None:
    _, batch = response([0.0] * 4, old=[0.0] * 4, rollout=[-log(x) for x in (0.5, 2.0, 0.499, 2.001)], adv=1.0)
    assert corrected([MIS(level="token", lo=0.5, hi=2.0 + 1e-12, weight="none")], batch).keep.tolist() == [
        [True, True, False, False]
    ]


def test_equals_a_loop() -> None:
    _, batch = random_batch("slime", size=(30, 6), spread=2.5)
    c = corrected(METHOD.parts, batch)
    ratios = [
        [exp(float(batch.old_logp[i, t] - batch.rollout_logp[i, t])) for t in row.nonzero().flatten().tolist()]
        for i, row in enumerate(batch.mask)
    ]
    mean = sum(min(x, 2.0) for row in ratios for x in row) / int(batch.mask.sum())
    vetoed = 0
    for i, row in enumerate(ratios):
        is_out = bool(row) and min(row) < 1e-4
        vetoed += is_out
        for t, x in enumerate(row):
            assert bool(c.keep[i, t]) == (0.5 <= x <= 2.0 and not is_out)
            assert_exact(c.weight[i, t].item(), min(x, 2.0) / mean)
    assert 0 < vetoed < 30 and 0 < c.keep.sum() < batch.mask.sum()
    assert_exact(c.weight[batch.mask].mean().item(), 1.0)
    assert abs(float(c.weight[c.keep].mean()) - 1.0) > 0.05


def test_normalisation_changes_the_gradient() -> None:
    logp, batch = random_batch("equal")
    plain = (TIS(cap=2.0), *METHOD.parts[1:])
    assert not torch.equal(objective(METHOD.parts, logp, batch)[1], objective(plain, logp, batch)[1])
