"""Masked importance sampling and rejection: golden numbers, bounds, combination, length, calibration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch

from harness.api import TokenBatch
from methods.dppo import DPPO
from methods.flashrl import TIS
from methods.icepop import IcePop
from methods.mis import K3RS, MIS, MOST_SIZES, GeoRS, Over, Reject, Stat, calibrated_bound, divergence
from methods.trm import TRM
from tests.loss_cases import (
    Algo,
    assert_exact,
    assert_published,
    corrected,
    golden_batch,
    golden_logp,
    random_batch,
    value_and_gradient,
)

KINDS = [(s, o) for s, o in product(get_args(Stat), get_args(Over)) if (s, o) != ("k1", "seq_max")]


@pytest.mark.parametrize(
    ("part", "denom", "value"),
    [
        (MIS(level="token", hi=2.0, weight="token"), "original", -0.041575),
        (MIS(level="token", hi=2.0, weight="token"), "kept", -0.046772),
        (MIS(level="sequence", hi=2.0), "original", 0.095010),
        (MIS(level="sequence", hi=2.0), "kept", 0.171019),
        (MIS(), "original", -1.155646),
    ],
)
def test_golden_losses(part: MIS, denom: str, value: float) -> None:
    batch, logp = golden_batch(), golden_logp()
    c = corrected([part], batch)
    loss, _ = value_and_gradient(logp, batch, c, Algo(denom=denom))
    assert_published(loss.item(), value)


def test_golden_masks_of_the_inverse_bounds() -> None:
    """verl's token_k1 "0.5_5.0" and "0.2_2.0" act on 1 / rho; ours act on rho unless asked."""
    batch = golden_batch()
    published = {
        (0.5, 5.0): [[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        (0.2, 2.0): [[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0]],
    }
    for (lo, hi), mask in published.items():
        verl = Reject(stat="k1", over="token", lo=lo, hi=hi, is_inverse=True)
        assert corrected([verl], batch).keep.int().tolist() == mask
        ours = Reject(stat="k1", over="token", lo=1 / hi, hi=1 / lo)
        assert corrected([ours], batch).keep.int().tolist() == mask
        other = Reject(stat="k1", over="token", lo=lo, hi=hi)
        assert corrected([other], batch).keep.int().tolist() != mask


def test_bounds_are_included_and_weights_stay_inside() -> None:
    _, batch = random_batch("bounds", spread=0.8)
    rho = (batch.old_logp - batch.rollout_logp).exp()
    edge = float(rho[0, 0])
    for lo, hi in ((edge, 10.0), (0.0, edge)):
        c = corrected([MIS(level="token", lo=lo, hi=hi, weight="token")], batch)
        assert c.keep[0, 0]
        inside = c.weight[c.keep]
        assert (inside >= lo * (1 - 1e-12)).all() and (inside <= hi * (1 + 1e-12)).all()
        assert_exact(inside, rho[c.keep])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("weight", ["token", "sequence", "geometric", "none"])
def test_levels_and_weights_are_chosen_apart(level: str, weight: str) -> None:
    _, batch = random_batch("levels")
    c = corrected([MIS(level=level, lo=0.8, hi=1.25, weight=weight)], batch)  # pyright: ignore[reportArgumentType]
    for i, mask in enumerate(batch.mask):
        d = (batch.old_logp - batch.rollout_logp)[i][mask]
        if not len(d):
            continue
        scores = {"token": d, "sequence": d.sum().expand_as(d), "geometric": d.mean().expand_as(d)}
        scores["none"] = torch.zeros_like(d)
        expected = (scores[level].exp() >= 0.8) & (scores[level].exp() <= 1.25)
        assert torch.equal(c.keep[i][mask], expected)
        assert_exact(c.weight[i][mask], scores[weight].exp())


def test_veto_reads_unclamped_ratios() -> None:
    _, batch = random_batch("veto")
    rollout = batch.rollout_logp.clone()
    rollout[1, 0] = batch.old_logp[1, 0] + 30.0
    batch = replace(batch, rollout_logp=rollout)
    keep = corrected([MIS(level="token", hi=1e9, weight="none", veto=1e-4)], batch).keep
    assert not keep[1].any() and torch.equal(keep[0], batch.mask[0])
    assert corrected([MIS(level="token", hi=1e9, weight="none", veto=1e-12)], batch).keep[1].sum() == 0
    assert corrected([MIS(level="token", hi=1e9, weight="none", veto=1e-14)], batch).keep[1].any()


@pytest.mark.parametrize(("stat", "over"), KINDS)
def test_divergences_equal_a_loop(stat: Stat, over: Over) -> None:
    _, batch = random_batch("divergence")
    d = torch.where(batch.mask, batch.old_logp - batch.rollout_logp, 0.0)
    found = divergence(d, batch.mask, stat, over)
    for i, mask in enumerate(batch.mask):
        x = d[i][mask]
        if not len(x):
            continue
        value = {"k1": x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[stat]
        reduced = {"token": value, "seq_sum": value.sum(), "seq_mean": value.mean(), "seq_max": value.max()}[over]
        assert_exact(found[i][mask], reduced.expand_as(x))


def doubled(batch: TokenBatch) -> TokenBatch:
    """Every response twice, end to end."""
    names = ("token_ids", "mask", "adv", "rollout_logp", "old_logp")
    return replace(batch, **{name: torch.cat([getattr(batch, name)] * 2, 1) for name in names})


def test_the_geometric_mean_does_not_see_the_length_and_the_product_does() -> None:
    _, batch = random_batch("length", size=(30, 9), spread=0.2)
    twice = doubled(batch)
    for level, is_blind in (("geometric", True), ("sequence", False)):
        part = MIS(level=level, lo=0.9, hi=1.1, weight="none")  # pyright: ignore[reportArgumentType]
        once, again = corrected([part], batch).keep, corrected([part], twice).keep
        assert torch.equal(once, again[:, :9]) == is_blind
    agreeing = replace(batch, rollout_logp=batch.old_logp)
    names = ("token_ids", "mask", "adv", "rollout_logp", "old_logp")
    padded = {name: torch.cat([getattr(batch, name), getattr(agreeing, name)], 1) for name in names}
    longer = replace(batch, **padded)
    part = GeoRS(lo=0.95, hi=1.05)
    once, again = corrected([part], batch).keep, corrected([part], longer).keep
    assert (once & ~again[:, :9]).sum() == 0 and again.sum() > once.sum()


def test_rejected_sequences_do_not_enter() -> None:
    logp, batch = random_batch("numerator")
    c = corrected([K3RS(hi=0.05), TIS()], batch)
    assert 0 < c.keep.sum() < batch.mask.sum()
    _, grad = value_and_gradient(logp, batch, c, Algo())
    assert (grad[~c.keep] == 0).all()


def test_calibrated_bounds_reject_the_asked_share_of_the_first_batch_and_stay() -> None:
    _, batch = random_batch("calibrate", size=(400, 5))
    for part in (GeoRS(reject_frac=0.05), K3RS(reject_frac=0.05), Reject(stat="k2", over="token", reject_frac=0.05)):
        memory: dict[str, float] = {}
        keep = part.correct(corrected([], batch), batch, memory).keep
        is_token = part.over == "token"
        share = 1 - (keep.sum() / batch.mask.sum() if is_token else keep.any(-1).sum() / batch.mask.any(-1).sum())
        assert abs(float(share) - 0.05) < 0.01
        before = dict(memory)
        part.correct(corrected([], batch), replace(batch, rollout_logp=batch.rollout_logp - 1.0), memory)
        assert memory == before and len(before) == 1


def test_a_bound_of_more_values_than_torch_takes_a_quantile_of() -> None:
    """512 responses of 32K tokens are as many as that: a bound that half of the values from 0 to 1 exceed is 1 / 2."""
    size = torch.linspace(0.0, 1.0, MOST_SIZES + 2)
    with pytest.raises(RuntimeError, match="too large"):
        size.quantile(0.5)
    assert calibrated_bound(size, 0.5, {}) == pytest.approx(0.5, abs=1e-5)
    assert calibrated_bound(size, 0.05, memory := {}) == memory["bound"] == pytest.approx(0.95, abs=1e-5)


def test_other_masks_reject_the_same_share_of_the_first_batch() -> None:
    """Tokens for IcePop and DPPO, responses for MIS and TRM; the second batch has the bound of the first."""
    logp, batch = random_batch("equal shares", size=(400, 5))
    further = replace(batch, rollout_logp=batch.rollout_logp - 1.0)
    empty = corrected([], batch)
    num_tokens, num_responses = int(batch.mask.sum()), int(batch.mask.any(-1).sum())
    for part in (MIS(reject_frac=0.1), MIS(level="token", reject_frac=0.1), IcePop(reject_frac=0.1)):
        memory: dict[str, float] = {}
        c = part.correct(empty, batch, memory)
        is_kept = c.keep & (c.weight > 0) & batch.mask
        by_token = isinstance(part, IcePop) or part.level == "token"
        share = int(is_kept.sum()) / num_tokens if by_token else int(is_kept.any(-1).sum()) / num_responses
        assert abs(1 - share - 0.1) < 0.01, part
        if isinstance(part, IcePop):
            assert_exact(c.weight[is_kept], (batch.old_logp - batch.rollout_logp)[is_kept].exp())
        bound = dict(memory)
        part.correct(empty, further, memory)
        assert memory == bound and len(bound) == 1
    memory = {}
    logp = logp.detach()
    keep = TRM(source="sampled", reject_frac=0.1).correct_update(empty, logp, batch, memory).keep
    assert abs(1 - int((keep & batch.mask).any(-1).sum()) / num_responses - 0.1) < 0.01
    memory = {}
    keep = DPPO(reject_frac=0.1).correct_update(empty, logp, batch, memory).keep
    shift = logp.exp() - batch.rollout_logp.exp()
    is_further = (shift.abs() > memory["bound"]) & ((batch.adv > 0) == (shift > 0))
    assert abs(float((shift.abs() > memory["bound"])[batch.mask].float().mean()) - 0.1) < 0.01
    assert torch.equal(~keep[batch.mask], is_further[batch.mask])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IcePop(reject_frac=1.0), r"IcePop.reject_frac: 1.0"),
        (lambda: MIS(reject_frac=-0.1), r"MIS.reject_frac: -0.1"),
        (lambda: TRM(reject_frac=2.0), r"TRM.reject_frac: 2.0"),
        (lambda: DPPO(reject_frac=1.5), r"DPPO.reject_frac: 1.5"),
        (lambda: MIS(lo=4.0), r"MIS.lo, hi: 4.0, 3.0"),
        (lambda: MIS(lo=-0.5), r"MIS.lo, hi: -0.5, 3.0 is not a band \(choose 0 <= lo < hi, or null for lo\)"),
        (lambda: MIS(veto=1.5), r"MIS.veto: 1.5 \(choose above 0 and below 1, or null\)"),
        (lambda: MIS(veto=0.0), r"MIS.veto: 0.0 \(choose above 0 and below 1, or null\)"),
        (lambda: K3RS(hi=-0.1), r"K3RS.hi: -0.1 would reject everything \(choose 0 or more\)"),
        (lambda: Reject(stat="k1"), r"Reject.lo, hi: k1"),
        (lambda: Reject(stat="k1", over="seq_max", lo=0.5, hi=2.0), r"Reject.lo, hi: k1 over seq_max"),
        (lambda: K3RS(lo=0.5), r"K3RS.lo: 0.5 means nothing for k3"),
        (lambda: K3RS(is_inverse=True), r"K3RS.is_inverse: true means nothing for k3 \(choose false\)"),
    ],
)
def test_bad_knobs(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # pyright: ignore[reportCallIssue]
