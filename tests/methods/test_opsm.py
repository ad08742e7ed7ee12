"""Off-policy sequence masking: the golden statistic, the sign of the advantage, both anchors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from methods.opsm import METHOD, OPSM, SLIME
from tests.loss_cases import (
    Algo,
    assert_exact,
    golden_batch,
    golden_logp,
    random_batch,
    response,
    value_and_gradient,
)
from tests.objective_cases import objective, updated


def test_golden_statistic() -> None:
    """mean(q - l) is -0.3125, 0.15, 0: row 2, the one with A < 0, goes for any threshold below 0.15."""
    batch = golden_batch()
    for delta, kept in ((0.1499, [True, False, True]), (0.1501, [True, True, True]), (0.0, [True, False, True])):
        keep = updated([OPSM(delta=delta)], golden_logp(), batch).keep
        assert torch.equal(keep, batch.mask & torch.tensor(kept)[:, None])


@pytest.mark.parametrize(
    ("adv", "gaps", "is_kept"),
    [
        (-1.0, [0.4, 0.5], True),
        (-1.0, [0.5, 0.6], False),
        (1.0, [2.0, 2.0], True),
        (-1.0, [-0.9, 1.0], True),
        (-1.0, [0.25, 0.75], True),
    ],
)
def test_golden_responses(adv: float, gaps: list[float], is_kept: bool) -> None:
    """Means of log(sampler / current) of 0.45, 0.55, 2, 0.05 and 0.5 against a threshold of 0.5, which stays."""
    logp, batch = response([-1.0] * 2, old=[-1.0] * 2, rollout=[-1.0 + gap for gap in gaps], adv=adv)
    assert updated([OPSM(delta=0.5)], logp, batch).keep.tolist() == [[is_kept, is_kept]]


def test_slime_drops_nothing_before_the_second_update() -> None:
    logp, batch = random_batch("first update")
    first = updated(SLIME.parts, batch.old_logp, batch).keep
    assert torch.equal(first, batch.mask)
    assert updated(SLIME.parts, logp, batch).keep.sum() < batch.mask.sum()
    assert updated([OPSM(delta=1e-4)], batch.old_logp, batch).keep.sum() < batch.mask.sum()
    assert OPSM(anchor="old").needs_updates == 2 and OPSM().needs_updates == 1


def test_at_the_threshold_of_slime_the_sampler_as_anchor_loses_every_long_bad_response() -> None:
    """A mismatch of 1e-3 nats per token: log rho has mean -1e-3 and variance 2e-3."""
    rng = torch.Generator().manual_seed(5)
    _, batch = random_batch("long", size=(40, 20_000), dtype=torch.float32)
    d = -1e-3 + 2e-3**0.5 * torch.randn(batch.mask.shape, generator=rng)
    batch = replace(batch, mask=torch.ones_like(batch.mask), rollout_logp=batch.old_logp - d)
    is_bad = batch.adv[:, 0] < 0
    dropped = ~updated([OPSM(delta=1e-4)], batch.old_logp, batch).keep.any(-1)
    assert torch.equal(dropped, is_bad)
    assert updated(METHOD.parts, batch.old_logp, batch).keep.all()


def test_a_wider_threshold_drops_less_and_the_gradient_of_the_rest_stays() -> None:
    logp, batch = random_batch("wider", size=(60, 9))
    keeps = [updated([OPSM(delta=delta)], logp, batch).keep for delta in (0.0, 0.05, 0.2, 50.0)]
    assert all((a & ~b).sum() == 0 and a.sum() <= b.sum() for a, b in pairwise(keeps))
    assert keeps[0].sum() < keeps[2].sum() and torch.equal(keeps[-1], batch.mask)
    _, grad = objective([OPSM(delta=0.05)], logp, batch)
    _, plain = value_and_gradient(logp, batch, updated([], logp, batch), Algo())
    assert_exact(grad, torch.where(keeps[1], plain, 0.0))


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"OPSM.delta: -1"):
        OPSM(delta=-1)
