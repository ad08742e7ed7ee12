"""KPop: the golden table of two-sided divergences, a loop, its symmetries, and the anchor of the probability."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor

from methods.icepop import IcePop
from methods.kpop import METHOD, KPop, two_sided_kl
from tests.loss_cases import Algo, assert_exact, corrected, random_batch, response
from tests.objective_cases import objective, updated


def pair(p: float, q: float) -> tuple[Tensor, Tensor]:
    """Log-probs [1, 1] of two probabilities."""
    return tuple(torch.tensor([[log(x)]], dtype=torch.float64) for x in (p, q))  # type: ignore[return-value]


def by_hand(p: float, q: float) -> float:
    """D(p || q) of "this token or any other"."""
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    ("p", "q", "forward", "backward", "is_kept", "icepop_keeps"),
    [
        (0.5, 0.7, 0.087177, 0.082283, True, True),
        (0.5, 0.72, 0.107588, 0.100194, False, True),
        (0.01, 0.001, 0.014067, 0.006738, True, False),
        (0.1, 0.01, 0.144479, 0.071331, False, False),
        (0.999, 0.9, 0.099650, 0.366593, False, True),
        (0.001, 0.05, 0.046330, 0.147823, False, False),
    ],
)
def test_golden_table(p: float, q: float, forward: float, backward: float, is_kept: bool, icepop_keeps: bool) -> None:
    assert (by_hand(p, q), by_hand(q, p)) == pytest.approx((forward, backward), abs=6e-7)
    assert two_sided_kl(*pair(p, q)).item() == pytest.approx(max(forward, backward), abs=6e-7)
    _, batch = response([0.0], old=[log(p)], rollout=[log(q)], adv=1.0)
    assert corrected(METHOD.parts, batch).keep.item() == is_kept
    pop = corrected([IcePop()], batch)
    assert bool(pop.keep.item() and pop.weight.item() != 0) == icepop_keeps


def test_equals_a_loop_and_weighs_by_the_untruncated_ratio() -> None:
    logp, batch = random_batch("kpop", size=(20, 8), spread=1.0)
    batch = replace(batch, old_logp=batch.old_logp.clamp(max=-0.01), rollout_logp=batch.rollout_logp.clamp(max=-0.01))
    c = corrected(METHOD.parts, batch)
    kept = 0
    for i, t in batch.mask.nonzero().tolist():
        p, q = exp(batch.old_logp[i, t]), exp(batch.rollout_logp[i, t])
        assert bool(c.keep[i, t]) == (by_hand(p, q) <= 0.1 and by_hand(q, p) <= 0.1)
        assert_exact(c.weight[i, t].item(), p / q)
        kept += bool(c.keep[i, t])
    assert 10 < kept < int(batch.mask.sum()) - 10 and c.weight[c.keep].max() > 2.2
    expected = torch.where(c.keep, objective([], logp, batch, Algo())[1] * c.weight, 0.0)
    found = objective(METHOD.parts, logp, batch, Algo(denom="kept"))[1]
    assert_exact(found * kept, expected * batch.mask.sum())


def test_symmetries_and_equal_probabilities() -> None:
    p, q = (torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    p, q = p.clamp(0.001, 0.999), q.clamp(0.001, 0.999)
    found = two_sided_kl(p.log(), q.log())
    assert_exact(found, two_sided_kl(q.log(), p.log()))
    torch.testing.assert_close(found, two_sided_kl((1 - p).log(), (1 - q).log()), rtol=1e-9, atol=1e-12)
    assert (two_sided_kl(p.log(), p.log()) == 0).all()
    for dtype in (torch.float32, torch.float64):
        certain = torch.tensor([0.0, -1e-9, -60.0], dtype=dtype)
        assert torch.isfinite(two_sided_kl(certain, certain.flip(0))).all()
        assert (two_sided_kl(certain, certain) == 0).all()


def test_the_current_policy_in_place_of_the_old_one() -> None:
    """policy=current: the mask moves with the policy and still weighs by old over rollout (prime-rl's mask)."""
    logp, batch = random_batch("policy", size=(20, 8))
    old, live = KPop(), KPop(policy="current")
    assert torch.equal(corrected([live], batch).keep, batch.mask)
    assert_exact(corrected([live], batch).weight, corrected([old], batch).weight)
    assert torch.equal(updated([live], logp, batch).keep, corrected([old], replace(batch, old_logp=logp.detach())).keep)
    assert torch.equal(updated([old], logp + 5.0, batch).keep, corrected([old], batch).keep)
    assert not torch.equal(updated([live], logp, batch).keep, updated([old], logp, batch).keep)


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"KPop.phi: 0"):
        KPop(phi=0.0)
