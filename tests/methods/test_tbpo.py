"""TBPO: losses by hand, both sides of the band, its gradients, and GSPO where the two agree."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor

from harness.api import Correction, TokenBatch
from harness.objective.loss import cleaned, count_totals, policy_loss, start
from methods.tbpo import TBPO, banded, sequence_ratio
from tests.loss_cases import Algo, assert_exact, assert_published, corrected, golden_batch, golden_logp, random_batch

SEQUENCE = Algo(agg="seq-mean-token-mean")
WIDE = TBPO(eps_low=0.2, eps_high=0.28, delta_n=None)
"""A band on the scale of tokens, as wide above 1 for both signs."""
UNBOUND = TBPO(eps_low=10.0, eps_high=10.0, delta_n=None)


def loss_and_grad(
    part: TBPO, logp: Tensor, batch: TokenBatch, algo: Algo = SEQUENCE, c: Correction | None = None
) -> tuple[Tensor, Tensor]:
    """The loss as the loop computes it, and its gradient."""
    c = c or corrected([part], batch)
    totals = count_totals(batch.mask, c.keep, 4)
    clean = cleaned(logp, batch, c)
    loss, _ = policy_loss(
        logp, batch, c, totals, algo, part_loss=part.token_loss(clean[0], clean[2], clean[1]),
        owns_objective=part.owns_objective,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad


def by_hand(part: TBPO, logp: Tensor, batch: TokenBatch) -> float:
    """The mean of -J over the responses, in plain Python."""
    rows, total, count, logp = batch.mask.tolist(), 0.0, 0, logp.detach()
    for i, row in enumerate(rows):
        at = [t for t, m in enumerate(row) if m]
        if not at:
            continue
        count += 1
        s = exp(sum(float(logp[i, t] - batch.old_logp[i, t]) for t in at) / len(at))
        w = min(exp(sum(float(batch.old_logp[i, t] - batch.rollout_logp[i, t]) for t in at) / len(at)), part.cap)
        adv = float(batch.adv[i, at[0]])
        delta = part.eps_high if part.delta_n is None else part.delta_n
        if adv >= 0:
            total += w * min(s * adv, min(s, 1 + part.eps_high) * adv)
        elif 1 - part.eps_low <= s <= 1 + delta:
            total += w * s * adv
    return -total / count


@pytest.mark.parametrize(
    "part",
    [
        TBPO(),
        WIDE,
        TBPO(eps_low=0.2, eps_high=0.28),
        TBPO(eps_low=0.2, eps_high=0.28, delta_n=0.05, cap=1.1),
        UNBOUND,
    ],
)
def test_losses_by_hand(part: TBPO) -> None:
    batch, logp = golden_batch(), golden_logp()
    assert_exact(loss_and_grad(part, logp, batch)[0].item(), by_hand(part, logp, batch))
    for seed in range(3):
        logp, batch = random_batch("tbpo", seed, spread=0.6)
        assert_exact(loss_and_grad(part, logp, batch)[0].item(), by_hand(part, logp, batch))


def test_golden_rows() -> None:
    """s = exp(.0625), exp(.0667), 1 and w = 1.284025, 0.805198, 1 of the golden example."""
    batch, logp = golden_batch(), golden_logp()
    assert_published(corrected([TBPO()], batch).weight[:, 0].tolist(), [1.284025, 0.805198, 1.0])
    assert_published(loss_and_grad(TBPO(), logp, batch)[0].item(), -(1.2840254 * 1.0004 + 0.5) / 3)
    wide = -(1.2840254 * exp(0.0625) - 0.8051983 * exp(0.2 / 3) + 0.5) / 3
    assert_published(loss_and_grad(WIDE, logp, batch)[0].item(), wide)
    cut = -(1.2840254 * exp(0.0625) + 0.5) / 3  # s = 1.069 is beyond the default width above 1
    assert_published(loss_and_grad(TBPO(eps_low=0.2, eps_high=0.28), logp, batch)[0].item(), cut)


@pytest.mark.parametrize(
    ("s", "weight", "adv", "objective"),
    [
        (1.001, 1.0, 1.0, 1.0004),
        (1.0005, 1.0, -1.0, -1.0005),
        (1.0008, 1.0, -1.0, 0.0),
        (0.9996, 1.0, -1.0, 0.0),
        (0.9998, 3.0, -1.0, -1.9996),
        (0.5, 1.0, 1.0, 0.5),
    ],
)
def test_constants_of_the_notes(s: float, weight: float, adv: float, objective: float) -> None:
    """J of one response of one token: 4e-4 above 1, 3e-4 below and 7e-4 above for A < 0, weights up to 2."""
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    _, batch = random_batch("notes", size=(2, 1))
    batch = replace(
        batch, token_ids=batch.token_ids[:1], mask=torch.ones(1, 1, dtype=torch.bool), adv=torch.full_like(old, adv),
        old_logp=old, rollout_logp=old - log(weight),
    )  # fmt: skip
    logp = (old + log(s)).requires_grad_()
    value, grad = loss_and_grad(TBPO(), logp, batch)
    assert_published(value.item(), -objective)
    assert_published(grad.item(), 0.0 if s > 1.0004 and adv > 0 else -objective)


@pytest.mark.parametrize(
    ("log_s", "adv", "alive"),
    [(0.5, -1.0, False), (-0.5, -1.0, False), (0.1, -1.0, True), (-0.1, -1.0, True),
     (0.5, 1.0, False), (-0.5, 1.0, True), (0.1, 1.0, True)],
)  # fmt: skip
def test_band(log_s: float, adv: float, alive: bool) -> None:
    """The gradient is exactly 0 beyond the band: both sides for a negative advantage, above for a positive one."""
    _, batch = random_batch("band", size=(2, 5))
    batch = replace(batch, adv=torch.full_like(batch.adv, adv))
    logp = (batch.old_logp + log_s).requires_grad_()
    _, grad = loss_and_grad(WIDE, logp, batch)
    assert (grad[batch.mask] != 0).all() if alive else (grad == 0).all()
    if alive:
        assert (grad[batch.mask].sign() == -adv).all()


def test_bounds_are_inclusive() -> None:
    s = torch.tensor([[0.5], [1.25], [1.5]], dtype=torch.float64)
    assert banded(s, -torch.ones(3, 1), 0.5, 1.25, 1.25).flatten().tolist() == [-0.5, -1.25, 0.0]
    assert banded(s, torch.ones(3, 1), 0.5, 1.25, 1.25).flatten().tolist() == [0.5, 1.25, 1.25]


def test_positive_advantages_are_those_of_gspo() -> None:
    logp, batch = random_batch("gspo", spread=0.0)
    batch = replace(batch, adv=batch.adv.abs())
    part = TBPO(eps_low=0.03, eps_high=0.04)
    c = start(batch, 0.03, 0.04)
    expected, _ = policy_loss(logp, batch, c, count_totals(batch.mask, c.keep, 4), Algo(loss="gspo"))
    (grad,) = torch.autograd.grad(expected, logp)
    value, same = loss_and_grad(part, logp, batch)
    assert_exact(value, expected.detach())
    assert_exact(same, grad)
    negative = replace(batch, adv=-batch.adv)
    assert (loss_and_grad(part, logp, negative)[1] == 0).any()


def test_token_mean_weights_responses_by_length() -> None:
    logp, batch = random_batch("lengths", spread=0.4)
    part = UNBOUND
    value, _ = loss_and_grad(part, logp, batch, Algo(agg="token-mean"))
    s = sequence_ratio(logp, batch.old_logp, batch.mask).detach()
    w = corrected([part], batch).weight
    lengths = batch.mask.sum(-1)
    assert_exact(value, -(w[:, 0] * s[:, 0] * batch.adv[:, 0] * lengths).sum() / lengths.sum())


def test_mismatch_band_and_cap() -> None:
    _, batch = random_batch("mismatch", spread=1.5)
    rho = corrected([TBPO(cap=1e9)], batch).weight
    c = corrected([TBPO(cap=1.2, lo=0.8, hi=1.3)], batch)
    assert_exact(c.weight, rho.clamp(max=1.2))
    assert torch.equal(c.keep, batch.mask & (rho >= 0.8) & (rho <= 1.3))
    assert 0 < c.keep.any(-1).sum() < batch.mask.any(-1).sum()


@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ({"eps_low": -0.1}, "eps_low"),
        ({"delta_n": -1.0}, "delta_n"),
        ({"cap": 0.0}, "cap"),
        ({"lo": 2.0, "hi": 1.0}, "lo, hi"),
    ],
)
def test_bad_knobs(knob: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"TBPO.{named}"):
        TBPO(**knob)
