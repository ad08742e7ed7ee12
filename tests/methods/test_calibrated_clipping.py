"""Calibrated clipping: the band by brute force, its identities, when it is calibrated, and what it guards against."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
from torch import Tensor

from harness.api import Correction, Step, TokenBatch
from harness.foundation.seeds import generator
from harness.objective.loss import start
from methods.calibrated_clipping import CalibratedClipping, matched_band, matched_high, matched_low
from tests.loss_cases import random_batch


def tokens(noise: float, spread: float = 0.25, n: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """(r_F, r_B, advantages) of n tokens, r_F = r_B with log-normal noise."""
    rng = generator("cpu", "calibrated clipping")
    shadow = (spread * torch.randn(n, generator=rng, dtype=torch.float64)).exp()
    adv = torch.randn(n, generator=rng, dtype=torch.float64)
    return shadow * (noise * torch.randn(n, generator=rng, dtype=torch.float64)).exp(), shadow, adv


def ratio_of_contributions(ratio: Tensor, adv: Tensor, low: float, high: float) -> float:
    """pos(r, high) / neg(r, low)."""
    up, down = (adv > 0) & (ratio <= high), (adv < 0) & (ratio >= low)
    return float((ratio * adv)[up].sum() / -(ratio * adv)[down].sum())


def test_equal_ratios_keep_the_band() -> None:
    for spread in (0.01, 0.25, 1.0):
        _, shadow, adv = tokens(0.0, spread)
        assert matched_band(shadow, shadow, adv, 0.8, 1.2, 5.0) == (0.8, 1.2)


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_band_by_brute_force(noise: float) -> None:
    ratio, shadow, adv = tokens(noise)
    band = matched_band(ratio, shadow, adv, 0.8, 1.2, 5.0)
    assert band is not None
    low, high = band
    down = adv < 0
    assert int((ratio[down] <= low).sum()) == int((shadow[down] <= 0.8).sum()) > 0
    assert low < 0.8, "noise spreads the ratios, so the same share lies below a smaller bound"
    wanted = ratio_of_contributions(shadow, adv, 0.8, 1.2)
    assert ratio_of_contributions(ratio, adv, low, high) == pytest.approx(wanted, rel=2e-3)
    steps = ratio[(adv > 0) & (ratio > 1)].sort().values.tolist()
    assert high == pytest.approx(
        next(h for h in steps if ratio_of_contributions(ratio, adv, low, h) >= wanted), rel=1e-9
    )
    usual = abs(ratio_of_contributions(ratio, adv, 0.8, 1.2) - wanted)
    assert usual > 2 * abs(ratio_of_contributions(ratio, adv, low, high) - wanted)
    assert high != 1.2


def test_low_bound() -> None:
    ratio = torch.tensor([0.5, 0.6, 0.7, 0.9, 1.1], dtype=torch.float64)
    assert matched_low(ratio, torch.tensor([0.7, 0.9, 1.0, 1.0, 1.1]), 0.8) == 0.5
    assert matched_low(ratio, torch.tensor([0.7, 0.7, 0.9, 1.0, 1.1]), 0.8) == 0.6
    assert matched_low(ratio, torch.tensor([0.7, 0.7, 0.7, 1.0, 1.1]), 0.8) == 0.8
    assert matched_low(ratio, torch.tensor([0.9, 0.9, 0.9, 1.0, 1.1]), 0.8) == 0.5
    assert matched_low(ratio, torch.full((5,), 0.1), 0.8) == pytest.approx(1.1)


def test_high_bound() -> None:
    ratio, gain = torch.tensor([0.9, 1.1, 2.0, 4.0]).double(), torch.ones(4).double()
    assert matched_high(ratio, gain, 3.0, 1.2, 5.0) == pytest.approx(2.0)
    assert matched_high(ratio, gain, 2.0, 1.2, 5.0) == 1.2
    assert matched_high(ratio, gain, 100.0, 1.2, 5.0) == pytest.approx(5.0)
    assert matched_high(ratio, gain, 0.0, 1.2, 5.0) == pytest.approx(1.0)


def test_one_sign_or_everything_clipped_gives_no_band() -> None:
    ratio, shadow, adv = tokens(0.1)
    assert matched_band(ratio, shadow, adv.abs(), 0.8, 1.2, 5.0) is None
    assert matched_band(ratio, shadow, -adv.abs(), 0.8, 1.2, 5.0) is None
    assert matched_band(ratio, torch.full_like(shadow, 0.1), adv, 0.8, 1.2, 5.0) is None


def case(index: int = 0, noise: float = 0.2) -> tuple[Tensor, TokenBatch, Correction]:
    """(current log-probs, a batch with shadow log-probs, its correction) at a step."""
    logp, batch = random_batch("calibration", size=(40, 20), spread=0.1)
    logp = logp.detach()
    rng = generator("cpu", "shadow")
    shift = noise * torch.randn(logp.shape, generator=rng, dtype=torch.float64)
    shadow = {"old": batch.old_logp + 0.5, "current": logp + shift + 0.5}
    batch = replace(batch, shadow=shadow, step=Step(index=index, total=100, seed=0))
    return logp, batch, start(batch, 0.2, 0.28)


def test_it_is_smoothed_kept_and_applied() -> None:
    part, memory = CalibratedClipping(), dict[str, float]()
    logp, batch, c = case()
    usable = batch.mask
    ratio, shadow = (logp - batch.old_logp)[usable].exp(), (batch.shadow["current"] - batch.shadow["old"])[usable].exp()
    band = matched_band(ratio, shadow, batch.adv[usable], 0.8, 1.28, 5.0)
    assert band is not None and band != (0.8, 1.28)
    out = part.correct_update(c, logp, batch, memory)
    first = (0.9 * 0.8 + 0.1 * band[0], 0.9 * 1.28 + 0.1 * band[1])
    assert (memory["low"], memory["high"]) == pytest.approx(first) and memory["num_calibrations"] == 1.0
    assert (out.clip_low == memory["low"]).all() and (out.clip_high == memory["high"]).all()
    assert torch.equal(out.weight, c.weight) and torch.equal(out.keep, c.keep)
    later_logp, later, later_c = case(index=7)
    kept = part.correct_update(later_c, later_logp, replace(later, shadow={}), memory)
    assert torch.equal(kept.clip_low, out.clip_low) and memory["num_calibrations"] == 1.0
    part.correct_update(c, logp, batch, memory)
    second = (0.9 * first[0] + 0.1 * band[0], 0.9 * first[1] + 0.1 * band[1])
    assert (memory["low"], memory["high"]) == pytest.approx(second)


def test_the_shadow_is_asked_for_only_when_it_is_used() -> None:
    part, memory = CalibratedClipping(interval=20), dict[str, float]()
    asked = [i for i in range(60) if part.needs(Step(index=i, total=60, seed=0))]
    assert asked == [0, 20, 40] and part.needs(Step(index=0, total=60, seed=0)) == {"shadow"}
    logp, batch, c = case(index=3)
    assert part.correct_update(c, logp, batch, memory) is c and memory == {}


def test_a_policy_that_has_not_moved_is_not_calibrated_on() -> None:
    part, memory = CalibratedClipping(smoothing=0.0), dict[str, float]()
    logp, batch, c = case()
    still = replace(batch, shadow={"old": batch.old_logp, "current": batch.old_logp})
    assert part.correct_update(c, logp, still, memory) is c
    assert part.correct_update(c, batch.old_logp, batch, memory) is c
    assert memory == {"num_skipped": 2.0}
    out = part.correct_update(c, logp, batch, memory)
    assert memory["num_calibrations"] == 1.0 and (out.clip_high != c.clip_high).all()


def test_high_precision_training_changes_nothing() -> None:
    logp, batch, c = case(noise=0.0)
    same = replace(batch, shadow={"old": batch.old_logp, "current": logp})
    memory = dict[str, float]()
    out = CalibratedClipping(smoothing=0.9).correct_update(c, logp, same, memory)
    torch.testing.assert_close(out.clip_low, c.clip_low, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.clip_high, c.clip_high, rtol=1e-12, atol=0)
    assert memory["num_calibrations"] == 1.0


def test_padding_and_rejected_tokens_do_not_count() -> None:
    logp, batch, c = case()
    part, plain, spoilt = CalibratedClipping(smoothing=0.0), dict[str, float](), dict[str, float]()
    part.correct_update(c, logp, batch, plain)
    holes = {name: torch.where(batch.mask, x, nan) for name, x in batch.shadow.items()}
    adv, old = torch.where(batch.mask, batch.adv, nan), torch.where(batch.mask, batch.old_logp, nan)
    part.correct_update(c, logp, replace(batch, shadow=holes, adv=adv, old_logp=old), spoilt)
    assert spoilt == plain
    rejected = dict[str, float]()
    keep = c.keep & (torch.arange(40)[:, None] < 20)
    part.correct_update(replace(c, keep=keep), logp, batch, rejected)
    half = dict[str, float]()
    part.correct_update(c, logp, replace(batch, mask=keep), half)
    assert rejected == half != plain


@pytest.mark.parametrize("knob", [{"interval": 0}, {"smoothing": 1.0}, {"max_high": 1.0}])
def test_bad_knobs(knob: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"CalibratedClipping.{next(iter(knob))}: "):
        CalibratedClipping(**knob)  # type: ignore[arg-type]


def test_it_acts_from_the_second_update_on() -> None:
    assert CalibratedClipping.needs_updates == 2
