"""M2PO: its mask by the published algorithm step by step, its two rules, its loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.flashrl import TIS
from methods.m2po import AREAL, M2PO, METHOD, M2Mask, outliers
from tests.loss_cases import Algo, assert_exact, golden_batch, random_batch, value_and_gradient
from tests.objective_cases import objective, updated


def dropped_one_by_one(moments: list[float], tau: float, at_least: int) -> set[int]:
    """Algorithm 1 of the paper: drop the largest while the mean of the rest exceeds tau."""
    left = set(range(len(moments)))
    while len(left) > at_least and left and sum(moments[i] for i in left) / len(left) > tau:
        left.remove(max(left, key=lambda i: moments[i]))
    return set(range(len(moments))) - left


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(0, 10**6), min_size=0, max_size=14, unique=True),
    tau=st.floats(1e-3, 0.5),
    at_least=st.integers(0, 2),
)
def test_outliers_equal_the_algorithm(values: list[int], tau: float, at_least: int) -> None:
    moments = [value / 1e6 for value in values]
    counted = torch.ones(1, len(moments), dtype=torch.bool)
    found = outliers(torch.tensor([moments], dtype=torch.float64), counted, tau, at_least)
    assert set(found[0].nonzero()[:, 0].tolist()) == dropped_one_by_one(moments, tau, at_least)


@pytest.mark.parametrize("method", [METHOD, AREAL], ids=lambda m: m.name)
def test_the_mask_equals_the_algorithm_on_a_batch(method: object) -> None:
    (part,) = method.parts  # pyright: ignore[reportAttributeAccessIssue]
    logp, batch = random_batch("m2po", size=(20, 9))
    keep = updated([part], logp, batch).keep
    d = (logp.detach() if part.policy == "current" else batch.old_logp) - batch.rollout_logp
    counted = batch.mask & (d * batch.adv > 0) if part.scope == "trust_region" else batch.mask
    dropped = dropped_one_by_one(d[counted].square().tolist(), part.tau, part.at_least)
    expected = batch.mask.clone()
    expected[counted] = torch.tensor([i not in dropped for i in range(int(counted.sum()))])
    assert torch.equal(keep, expected) and 0 < len(dropped) < counted.sum()
    kept, out = d[counted & keep].square(), d[counted & ~keep].square()
    assert kept.mean() <= part.tau < torch.cat([kept, out.min()[None]]).mean() and kept.max() <= out.min()


def test_the_paper_masks_only_what_a_clip_could_and_areal_does_not_ask() -> None:
    batch = golden_batch()
    d = batch.old_logp - batch.rollout_logp
    paper = updated([M2Mask(policy="old")], batch.old_logp, batch).keep
    areal = updated(AREAL.parts, batch.old_logp, batch).keep
    assert (batch.mask & ~paper)[0].tolist() == [False, False, True, False]  # A > 0, d = 1.2
    assert (batch.mask & ~paper)[1].tolist() == [False, True, False, False]  # A < 0, d = -0.9
    assert not ((d * batch.adv <= 0) & batch.mask & ~paper).any()
    flipped = replace(batch, adv=-batch.adv)
    assert torch.equal(updated(AREAL.parts, batch.old_logp, flipped).keep, areal)
    assert updated([M2Mask(policy="old")], batch.old_logp, flipped).keep[0, 2]


def test_at_least_one_token_stays_for_areal_and_none_need_for_the_paper() -> None:
    logp, batch = random_batch("far", spread=0.1)
    far = replace(batch, old_logp=batch.rollout_logp - 3.0, adv=-torch.ones_like(batch.adv))
    assert updated(AREAL.parts, logp, far).keep.sum() == 1
    assert updated(METHOD.parts, far.old_logp, far).keep.sum() == 0
    assert objective(METHOD.parts, far.old_logp.requires_grad_(), far)[0] == 0


def test_a_wider_threshold_masks_less_and_a_small_shift_masks_nothing() -> None:
    logp, batch = random_batch("wider", size=(20, 9))
    keeps = [updated([M2PO(tau=tau)], logp, batch).keep for tau in (0.01, 0.04, 0.08, 9.0)]
    assert all((a & ~b).sum() == 0 and a.sum() < b.sum() for a, b in pairwise(keeps))
    assert torch.equal(keeps[-1], batch.mask)
    near = replace(batch, rollout_logp=logp.detach() + 0.19)
    assert torch.equal(updated(METHOD.parts, logp, near).keep, batch.mask)


def test_the_loss_is_the_masked_ratio_over_all_tokens() -> None:
    logp, batch = random_batch("loss", size=(20, 9))
    loss, grad = objective(METHOD.parts, logp, batch)
    keep = updated(METHOD.parts, logp, batch).keep
    ratio = (logp.detach() - batch.rollout_logp).exp()
    expected = torch.where(keep, -batch.adv * ratio, 0.0) / batch.mask.sum()
    assert_exact(loss, expected.sum())
    assert_exact(grad, expected)
    weighted = objective([TIS(), *METHOD.parts], logp, batch)
    assert torch.equal(weighted[0], loss) and torch.equal(weighted[1], grad)


def test_areal_goes_on_with_the_clipped_loss() -> None:
    logp, batch = random_batch("clipped", size=(20, 9))
    c = updated(AREAL.parts, logp, batch)
    algo = Algo(denom=AREAL.denom or "")
    found, plain = objective(AREAL.parts, logp, batch, algo), value_and_gradient(logp, batch, c, algo)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    _, grad = value_and_gradient(logp, batch, updated([], logp, batch), Algo())
    assert_exact(objective(AREAL.parts, logp, batch, Algo())[1], torch.where(c.keep, grad, 0.0))


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"M2PO.tau, at_least: -1"):
        M2PO(tau=-1)
