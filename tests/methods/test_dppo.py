"""DPPO: which tokens its mask drops, its loss and gradient by a loop, what multiplies it."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, nan
from typing import Literal

import pytest
import torch

from harness.api import TokenBatch
from methods.dppo import DPPO, PRIME_RL, Anchor, binary_kl
from methods.flashrl import TIS
from methods.mis import Reject
from tests.loss_cases import STEP, assert_exact, corrected, random_batch, response
from tests.objective_cases import objective, updated


def one_token(before: float, after: float, adv: float) -> tuple[torch.Tensor, TokenBatch]:
    """A batch of one token whose probability changes between sampler and trainer."""
    field = torch.full((1, 1), log(before), dtype=torch.float64)
    batch = TokenBatch(
        token_ids=torch.zeros(1, 1, dtype=torch.int64), mask=torch.ones(1, 1, dtype=torch.bool),
        adv=torch.full((1, 1), adv, dtype=torch.float64), rollout_logp=field, old_logp=field, step=STEP,
    )  # fmt: skip
    return torch.full((1, 1), log(after), dtype=torch.float64).requires_grad_(), batch


def probable(*seed: str, size: tuple[int, int] = (6, 7), spread: float = 0.8) -> tuple[torch.Tensor, TokenBatch]:
    """A random batch whose log-probs are all below 0."""
    logp, batch = random_batch(*seed, size=size, spread=spread)
    fields = {name: getattr(batch, name).clamp(max=-1e-3) for name in ("rollout_logp", "old_logp")}
    return logp.detach().clamp(max=-1e-3).requires_grad_(), replace(batch, **fields)


@pytest.mark.parametrize(
    ("before", "after", "adv", "is_kept", "is_clipped"),
    [
        (1e-4, 5e-3, 1.0, True, True),  # a rare token, fifty-fold
        (0.90, 0.74, -1.0, False, False),  # a common one, ratio 0.82
        (0.90, 0.74, 1.0, True, False),  # the same move towards the anchor's side is never masked
        (0.20, 0.36, 1.0, False, True),
        (0.20, 0.36, -1.0, True, False),
        (0.20, 0.34, 1.0, True, True),
    ],
)
def test_the_mask_follows_probabilities_and_the_clip_ratios(
    before: float, after: float, adv: float, is_kept: bool, is_clipped: bool
) -> None:
    logp, batch = one_token(before, after, adv)
    _, grad = objective([DPPO()], logp, batch)
    ratio = min(after / before, 20.0)
    assert_exact(grad.item(), -adv * ratio if is_kept else 0.0)
    _, grad = objective([], logp, batch)
    assert (grad.item() == 0) == is_clipped


def test_the_binary_kl_and_its_bound() -> None:
    p0, p = 0.9, 0.74
    expected = p0 * log(p0 / p) + (1 - p0) * log((1 - p0) / (1 - p))
    logp, batch = one_token(p0, p, -1.0)
    assert abs(binary_kl(logp, batch.rollout_logp).item() - expected) < 1e-6
    for delta, is_kept in ((expected + 1e-4, True), (expected - 1e-4, False)):
        part = DPPO(divergence="kl", delta_low=delta, delta_high=1e-9)
        assert updated([part], logp, batch).keep.item() == is_kept
    certain = torch.tensor([[0.0]])
    assert torch.isfinite(binary_kl(certain, certain)).all() and torch.isfinite(binary_kl(certain - 5.0, certain)).all()


@pytest.mark.parametrize(
    ("divergence", "bound"),
    [
        ("tv", 0.25),  # shifts 0.05, 0.1, 0.2, 0.3, 0.4, 0.45: halfway between the middle two
        ("kl", -(log(0.84) + log(0.64)) / 4),  # KL from 0.5 to p is -log(4 p (1 - p)) / 2; the middle two: p 0.7, 0.2
    ],
)
def test_a_share_to_reject_sets_the_bound_by_the_first_batchs_tokens_that_have_a_ratio(
    divergence: Literal["tv", "kl"], bound: float
) -> None:
    """Half of six tokens lie beyond, and the mask spares the one of them that moves back. The seventh token has no
    sampler's log-prob and the last is outside the mask: neither counts."""
    after = [0.55, 0.4, 0.7, 0.2, 0.9, 0.95, 0.99, 0.99]
    logp, batch = response(
        [log(p) for p in after], old=[log(0.3)] * 8, rollout=[log(0.5)] * 6 + [nan, log(0.5)],
        adv=[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0],
    )  # fmt: skip
    batch.mask[0, -1] = False
    part, memory = DPPO(divergence=divergence, reject_frac=0.5), dict[str, float]()
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    part.correct_update(corrected([], nothing), logp.detach(), nothing, memory)
    assert memory == {}
    kept = [[1, 1, 1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0, 0]]
    for expected, now in zip(kept, (logp.detach(), logp.detach() - 1.0), strict=True):  # the first update's bound stays
        assert part.correct_update(corrected([], batch), now, batch, memory).keep[0].int().tolist() == expected
        assert memory == {"bound": pytest.approx(bound, abs=1e-7)}


def test_prime_rls_rule_equals_a_loop() -> None:
    """A differentiable ratio without a cap, and a penalty on every token. The others: test_oracles_methods."""
    (part,) = PRIME_RL.parts
    assert isinstance(part, DPPO)
    logp, batch = probable("dppo", size=(20, 9))
    loss, grad = objective([part], logp, batch)
    total, slopes = 0.0, torch.zeros_like(grad)
    num_masked = 0
    for i, t in batch.mask.nonzero().tolist():
        a, now, before = (x[i, t].item() for x in (batch.adv, logp, batch.rollout_logp))
        p, p0 = exp(now), exp(before)
        away = p > p0 if a > 0 else p < p0
        limit = part.delta_high if a > 0 else part.delta_low
        is_masked = away and abs(p - p0) > limit
        num_masked += is_masked
        if not is_masked:
            total -= a * p / p0
            slopes[i, t] -= a * p / p0
        total += part.kappa * (now - before) ** 2
        slopes[i, t] += 2 * part.kappa * (now - before)
    count = int(batch.mask.sum())
    assert 3 < num_masked < count / 2
    assert_exact(loss.item(), total / count)
    assert_exact(grad, slopes / count)


@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_a_weight_counts_only_where_the_ratio_leaves_the_sampler_out(anchor: Anchor) -> None:
    logp, batch = probable("weights")
    part = DPPO(ratio_anchor=anchor, mask_anchor=anchor)
    alone, weighted = objective([part], logp, batch)[1], objective([TIS(), part], logp, batch)[1]
    expected = alone if anchor == "rollout" else alone * updated([TIS()], logp, batch).weight
    assert_exact(weighted[batch.mask], expected[batch.mask])
    assert torch.equal(alone, weighted) == (anchor == "rollout")


def test_rejected_tokens_keep_only_the_penalty_and_denominators_stay() -> None:
    logp, batch = probable("rejected")
    rejection = Reject(stat="k2", over="token", hi=0.1)
    keep = updated([rejection, *PRIME_RL.parts], logp, batch).keep
    assert 0 < keep.sum() < updated(PRIME_RL.parts, logp, batch).keep.sum() < batch.mask.sum()
    _, grad = objective([rejection, *PRIME_RL.parts], logp, batch)
    penalty = 2e-3 * (logp.detach() - batch.rollout_logp) / batch.mask.sum()
    assert_exact(grad[batch.mask & ~keep], penalty[batch.mask & ~keep])


def test_the_mask_anchor_and_the_ratio_anchor_are_apart() -> None:
    logp, batch = probable("anchors", spread=1.5)
    recompute = DPPO(mask_anchor="old")
    sampler = replace(batch, old_logp=batch.rollout_logp)
    keep = updated([recompute], logp, batch).keep
    assert not torch.equal(keep, updated([DPPO()], logp, batch).keep)
    assert torch.equal(updated([recompute], logp, sampler).keep, updated([DPPO()], logp, batch).keep)
    both = updated([recompute], logp, batch).keep & updated([DPPO()], logp, batch).keep
    assert_exact(objective([recompute], logp, batch)[1][both], objective([DPPO()], logp, batch)[1][both])


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"DPPO.delta_low, delta_high: 0"):
        DPPO(delta_low=0)
    with pytest.raises(ValueError, match=r"DPPO.cap: 0.5"):
        DPPO(cap=0.5)
    with pytest.raises(ValueError, match=r"^DPPO.kappa: -0.1 is negative \(choose 0 or more\)$"):
        DPPO(kappa=-0.1)
