"""ACRL: the weights by hand, which way they steer, the set point in memory, and tiny or invalid gaps."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor

from harness.api import TokenBatch
from harness.objective.loss import start
from methods.acrl import ACRL, SMALLEST, steering_weight
from tests.loss_cases import assert_exact, assert_published, golden_batch, random_batch


def weights(part: ACRL, batch: TokenBatch, memory: dict[str, float]) -> Tensor:
    """The weights of one batch."""
    return part.correct(start(batch, 0.2, 0.2), batch, memory).weight


def by_hand(batch: TokenBatch, x: float, gamma: float, over: str) -> list[list[float]]:
    """The rule in plain Python, 1 outside the mask."""
    rows = []
    mask = batch.mask.tolist()
    old, rollout, adv = batch.old_logp.tolist(), batch.rollout_logp.tolist(), batch.adv.tolist()
    gaps = [
        [abs(exp(o) - exp(q)) for o, q, m in zip(*row, strict=True) if m]
        for row in zip(old, rollout, mask, strict=True)
    ]
    every = [gap for row in gaps for gap in row]
    for i, row in enumerate(gaps):
        kind = every if over == "batch" else row
        y = sum(kind) / max(len(kind), 1)
        out = []
        for o, q, a, m in zip(old[i], rollout[i], adv[i], mask[i], strict=True):
            power = gamma * ((a > 0) - (a < 0)) * (1 - y / x) * (o - q)
            out.append(exp(max(min(power, log(5)), -log(5))) if m else 1.0)
        rows.append(out)
    return rows


@pytest.mark.parametrize(
    ("adv", "gap", "weight"), [(1.0, 0.02, 0.768317), (-1.0, 0.02, 1.301545), (1.0, 0.005, 1.140853), (1.0, 0.01, 1.0)]
)
def test_golden_weights(adv: float, gap: float, weight: float) -> None:
    """rho 1.5 at a set point of 0.01 and gamma 0.65."""
    log_ratio, sign, y = (torch.tensor([[x]], dtype=torch.float64) for x in (log(1.5), adv, gap))
    assert_published(steering_weight(log_ratio, sign, y, 0.01, 0.65, 5.0).item(), weight)


@pytest.mark.parametrize("over", ["response", "batch"])
def test_weights_by_hand(over: str) -> None:
    _, first = random_batch("first", spread=0.3)
    _, later = random_batch("later", spread=0.9)
    part, memory = ACRL(gamma=1.1, num_batches=1, over=over), dict[str, float]()  # type: ignore[arg-type]
    x = float((first.old_logp.exp() - first.rollout_logp.exp()).abs()[first.mask].mean())
    assert_exact(weights(part, first, memory), torch.tensor(by_hand(first, x, 1.1, over), dtype=torch.float64))
    assert_exact(weights(part, later, memory), torch.tensor(by_hand(later, x, 1.1, over), dtype=torch.float64))
    assert memory["set_point"] == pytest.approx(x, rel=1e-12) and memory["gap"] > x
    assert memory["is_set_point_tiny"] == 0.0 and memory["num_batches"] == 1.0


def test_set_point_is_the_mean_of_the_first_batches() -> None:
    part, memory, gaps = ACRL(), dict[str, float](), list[float]()
    for i in range(6):
        _, batch = random_batch("set point", i)
        gaps.append(float((batch.old_logp.exp() - batch.rollout_logp.exp()).abs()[batch.mask].mean()))
        weights(part, batch, memory)
        assert memory["set_point"] == pytest.approx(sum(gaps[:4]) / len(gaps[:4]), rel=1e-12)


def test_identities() -> None:
    _, batch = random_batch("identities", spread=0.6)
    gap = (batch.old_logp.exp() - batch.rollout_logp.exp()).abs()[batch.mask].mean()
    same = weights(ACRL(over="batch", num_batches=1), batch, {})
    torch.testing.assert_close(same, torch.ones_like(same), rtol=0, atol=1e-12)
    assert (weights(ACRL(gamma=0.0), batch, {"set_point": 1e-3, "num_batches": 4.0}) == 1).all()
    known = {"set_point": 0.5 * float(gap), "num_batches": 4.0}
    up, down = (weights(ACRL(), replace(batch, adv=sign * batch.adv), dict(known)) for sign in (1.0, -1.0))
    assert_exact(up * down, torch.ones_like(up))
    assert (up != 1).any()
    assert (weights(ACRL(), replace(batch, adv=torch.zeros_like(batch.adv)), dict(known)) == 1).all()


def test_it_steers_towards_the_set_point() -> None:
    """With A > 0: a gap above the set point damps tokens that the trainer likes better than the sampler."""
    log_ratio = torch.tensor([[0.4, -0.4]], dtype=torch.float64)
    adv = torch.ones_like(log_ratio)
    wide, close = (
        steering_weight(log_ratio, adv, torch.tensor(y, dtype=torch.float64), 0.02, 0.65, 5.0)[0] for y in (0.06, 0.01)
    )
    assert wide[0] < 1 < wide[1] and close[0] > 1 > close[1]
    assert_exact(wide, torch.tensor([exp(-0.65 * 2 * 0.4), exp(0.65 * 2 * 0.4)], dtype=torch.float64))
    assert_exact(close, torch.tensor([exp(0.65 * 0.5 * 0.4), exp(-0.65 * 0.5 * 0.4)], dtype=torch.float64))


def test_a_tiny_set_point_is_flagged_and_does_not_explode() -> None:
    _, batch = random_batch("tiny", spread=1e-9)
    memory = dict[str, float]()
    quiet = weights(ACRL(), batch, memory)
    assert memory["is_set_point_tiny"] == 1.0 and memory["set_point"] < SMALLEST
    assert (quiet - 1).abs().max() < 1e-6
    _, loud = random_batch("loud", spread=1.0)
    w = weights(ACRL(), loud, {"set_point": 1e-12, "num_batches": 4.0})
    assert torch.isfinite(w).all() and w.max() <= 5 * (1 + 1e-12) and w.min() >= 0.2 * (1 - 1e-12)


def test_an_empty_batch_leaves_the_memory_alone() -> None:
    batch, nothing = golden_batch(), dict[str, float]()
    assert (weights(ACRL(), replace(batch, mask=torch.zeros_like(batch.mask)), nothing) == 1).all() and nothing == {}


@pytest.mark.parametrize("knob", [{"gamma": -1.0}, {"num_batches": 0}, {"bound": 0.5}])
def test_bad_knobs(knob: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"ACRL.{next(iter(knob))}: "):
        ACRL(**knob)  # type: ignore[arg-type]
