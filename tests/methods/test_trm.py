"""Trust region masking: the golden loss, both sources of the divergence, whole responses, fixed counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.api import TokenBatch
from methods.flashrl import TIS
from methods.trm import METHOD, SAMPLED, TRM
from tests.loss_cases import STEP, Algo, assert_exact, assert_published, golden_batch, golden_logp, random_batch
from tests.objective_cases import objective, updated

SUM = Algo(agg="seq-mean-token-sum")


def with_kl(batch: TokenBatch, spread: float = 0.05) -> TokenBatch:
    """The batch with a full-vocabulary KL per token, NaN where padded."""
    kl = spread * (batch.old_logp - batch.rollout_logp).abs()
    return replace(batch, extras={"rollout_kl": torch.where(batch.mask, kl, torch.nan)})


def test_golden_loss() -> None:
    """Sequence maximum of k2 at most 0.5, from old policy over sampler: rows 2 and 3 stay; N counts all three."""
    part = TRM(source="sampled", policy="old", delta_max=0.5)
    batch = golden_batch()
    assert updated([part], golden_logp(), batch).keep.any(-1).tolist() == [False, True, True]
    assert_published(objective([part], golden_logp(), batch, SUM)[0].item(), 0.816040)


def test_equals_a_loop() -> None:
    logp, batch = random_batch("trm", size=(30, 7), spread=0.2)
    part = TRM(source="sampled", delta_max=0.1, delta_mean=0.05)
    total, slopes, accepted = 0.0, torch.zeros_like(logp), 0
    for i, mask in enumerate(batch.mask):
        if not mask.any():
            continue
        d = (logp.detach() - batch.rollout_logp)[i][mask]
        if (d.square() / 2).max() <= 0.1 and (d.exp() - 1 - d).mean() <= 0.05:
            accepted += 1
            total -= float((batch.adv[i][mask] * d.exp()).sum())
            slopes[i][mask] = -batch.adv[i][mask] * d.exp()
    count = int(batch.mask.any(-1).sum())
    assert 3 < accepted < count - 3
    loss, grad = objective([part], logp, batch, SUM)
    assert_exact(loss.item(), total / count)
    assert_exact(grad, slopes / count)


def test_full_reads_the_divergence_of_whole_distributions() -> None:
    logp, batch = random_batch("full", size=(30, 7))
    batch = with_kl(batch)
    kl = torch.where(batch.mask, batch.extras["rollout_kl"], 0.0)
    for part in (TRM(delta_max=0.03), TRM(delta_max=9.0, delta_mean=0.02), TRM(delta_max=0.03, delta_mean=0.01)):
        accepted = kl.amax(-1) <= part.delta_max
        if part.delta_mean is not None:
            accepted &= kl.sum(-1) / batch.mask.sum(-1).clamp(min=1) <= part.delta_mean
        assert torch.equal(updated([part], logp, batch).keep, batch.mask & accepted[:, None])
        assert 0 < accepted.sum() < len(accepted)
        assert torch.equal(updated([part], logp + 1.0, batch).keep, updated([part], logp, batch).keep)
    assert METHOD.parts[0].needs(STEP) == {"rollout_kl"} and SAMPLED.parts[0].needs(STEP) == frozenset()


def test_one_far_token_drops_its_whole_response() -> None:
    logp, batch = random_batch("far", spread=0.05)
    near = replace(batch, rollout_logp=logp.detach() + 0.01)
    rollout = near.rollout_logp.clone()
    rollout[0, 3] += 1.0
    far = replace(near, rollout_logp=rollout)
    assert torch.equal(updated(SAMPLED.parts, logp, near).keep, batch.mask)
    assert torch.equal(updated(SAMPLED.parts, logp, far).keep, batch.mask & (torch.arange(6) > 0)[:, None])


def test_the_value_is_linear_in_what_is_accepted() -> None:
    """Two batches that reject complementary rows add up to the loss that rejects none: N never changes."""
    logp, batch = random_batch("linear", size=(10, 5))
    kl = torch.where(torch.arange(10)[:, None] < 4, 1.0, 0.0).expand(10, 5)
    losses = [
        objective(METHOD.parts, logp, replace(batch, extras={"rollout_kl": x}), SUM)
        for x in (kl, 1.0 - kl, torch.zeros_like(kl))
    ]
    for first, second, whole in zip(*losses, strict=True):
        assert_exact(first + second, whole)


def test_weights_do_not_count_twice() -> None:
    logp, batch = random_batch("weights", spread=0.1)
    alone, weighted = (objective(parts, logp, batch, SUM) for parts in (SAMPLED.parts, (TIS(), *SAMPLED.parts)))
    assert all(torch.equal(a, b) for a, b in zip(alone, weighted, strict=True))


def test_bad_knobs() -> None:
    with pytest.raises(ValueError, match=r"TRM.delta_max, delta_mean: -1"):
        TRM(delta_max=-1)
