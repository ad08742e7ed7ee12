"""IcePop: golden values, closed bounds, unchanged denominators. Its weights: test_oracles_losses, against verl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from methods.flashrl import TIS
from methods.icepop import IcePop
from tests.loss_cases import (
    Algo,
    assert_published,
    corrected,
    golden_batch,
    golden_logp,
    random_batch,
    value_and_gradient,
)


@pytest.mark.parametrize(
    ("beta", "agg", "value"),
    [(2.0, "token-mean", -0.077714), (5.0, "token-mean", -0.520397), (5.0, "seq-mean-token-mean", -0.385420)],
)
def test_golden_losses(beta: float, agg: str, value: float) -> None:
    batch, logp = golden_batch(), golden_logp()
    c = corrected([IcePop(alpha=0.5, beta=beta)], batch)
    for denom in ("original", "kept"):
        loss, _ = value_and_gradient(logp, batch, c, Algo(agg=agg, denom=denom))
        assert_published(loss.item(), value)


def test_the_bounds_belong_to_the_band() -> None:
    _, batch = random_batch("band", spread=1.0)
    agreeing = replace(batch, rollout_logp=batch.old_logp)
    for part in (IcePop(alpha=1.0, beta=2.0), IcePop(alpha=0.5, beta=1.0)):
        assert (corrected([part], agreeing).weight == 1.0).all()


def test_without_a_lower_bound_it_pops_where_tis_clips() -> None:
    _, batch = random_batch("pops", spread=1.0)
    popped = corrected([IcePop(alpha=0.0, beta=2.0)], batch).weight
    clipped = corrected([TIS(cap=2.0)], batch).weight
    differs = popped != clipped
    assert differs.any() and (clipped[differs] == 2.0).all() and (popped[differs] == 0.0).all()


def test_bad_band() -> None:
    with pytest.raises(ValueError, match=r"IcePop.alpha, beta: 5.0, 0.5"):
        IcePop(alpha=5.0, beta=0.5)
