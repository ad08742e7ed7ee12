"""VESPO: its weight's shape, the response's ratio by a loop, what the correction weight does in it."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch

from methods.flashrl import TIS
from methods.icepop import IcePop
from methods.mis import Reject
from methods.vespo import METHOD, VESPO, gamma_weight
from tests.loss_cases import assert_exact, random_batch
from tests.objective_cases import objective, updated


@pytest.mark.parametrize(("k", "lam", "largest"), [(2.0, 3.0, 1.208), (3.0, 2.0, 1.242)])
def test_the_weight_is_one_at_one_and_largest_at_k_over_lambda(k: float, lam: float, largest: float) -> None:
    power, rate = torch.tensor(k, dtype=torch.float64), torch.tensor(lam, dtype=torch.float64)
    assert gamma_weight(torch.zeros(1, dtype=torch.float64), power, rate) == 1
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    phi = gamma_weight(grid, power, rate)
    assert abs(grid[phi.argmax()].exp() - k / lam) < 1e-3 and abs(phi.max() - largest) < 5e-4
    far = gamma_weight(torch.tensor([-torch.inf, -100.0, 100.0, torch.inf], dtype=torch.float64), power, rate)
    assert torch.isfinite(far).all() and (far >= 0).all() and far.max() < 1e-14


def test_equals_a_loop() -> None:
    logp, batch = random_batch("vespo", size=(20, 6), spread=0.5)
    total, slopes = 0.0, torch.zeros_like(logp)
    for i, mask in enumerate(batch.mask):
        steps = (logp.detach() - batch.old_logp)[i][mask].tolist()
        mismatch = (batch.old_logp - batch.rollout_logp)[i][mask].tolist()
        log_w = sum(steps) + sum(min(d, log(2.0)) for d in mismatch)
        a = float(batch.adv[i, 0])
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi = exp(lam) * exp(log_w) ** k * exp(-lam * exp(log_w))
        total -= phi * a * float(logp.detach()[i][mask].sum())
        slopes[i][mask] = -phi * a
    count = int(batch.mask.sum())
    loss, grad = objective(METHOD.parts, logp, batch)
    assert_exact(loss.item(), total / count)
    assert_exact(grad, slopes / count)


def test_the_correction_weight_enters_the_ratio_and_nothing_else() -> None:
    logp, batch = random_batch("weights", spread=0.8)
    alone, tis, pop = (objective([*parts, VESPO()], logp, batch)[1] for parts in ([], [TIS()], [IcePop()]))
    assert not torch.equal(alone, tis) and not torch.equal(tis, pop)
    whole = replace(batch, old_logp=batch.rollout_logp)
    assert_exact(objective([TIS(cap=1e9), VESPO()], logp, batch)[1], objective([VESPO()], logp, whole)[1])
    popped = objective([IcePop(alpha=0.999, beta=1.001), VESPO()], logp, batch)[1]
    assert popped.abs().max() < 1e-9


def test_rejected_tokens_get_no_gradient() -> None:
    logp, batch = random_batch("rejected")
    parts = [Reject(stat="k2", over="token", hi=0.05), *METHOD.parts]
    keep = updated(parts, logp, batch).keep
    assert 0 < keep.sum() < batch.mask.sum()
    assert_exact(objective(parts, logp, batch)[1], torch.where(keep, objective(METHOD.parts, logp, batch)[1], 0.0))


def test_extremes_stay_finite() -> None:
    logp, batch = random_batch("extremes", dtype=torch.float32)
    for shift in (-50.0, 50.0):
        far = replace(batch, rollout_logp=logp.detach() + shift, old_logp=logp.detach() + shift)
        loss, grad = objective(METHOD.parts, logp, far)
        assert torch.isfinite(loss) and torch.isfinite(grad).all() and grad.abs().max() < 1e-9


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"VESPO.k_pos"):
        VESPO(lambda_neg=0)
