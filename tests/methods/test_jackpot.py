"""Jackpot: the golden distributions, what acceptance does to a sampler, draws that depend on the response alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import Memory, TokenBatch
from harness.foundation.seeds import generator
from harness.objective.loss import start
from harness.run.loop import grpo_step
from harness.trainers.corrected_step import take_batch
from methods.jackpot import Jackpot, acceptance, accepted_weight, draws
from tests.loss_cases import STEP, Algo, assert_exact, assert_published, random_batch
from tests.objective_cases import objective
from tests.toy import small_run

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)


def kl(a: Tensor, b: Tensor) -> float:
    """KL(a || b), nats."""
    return float((a * (a / b).log()).sum())


def named(batch: TokenBatch) -> TokenBatch:
    """The batch with token ids that differ from response to response."""
    return replace(batch, token_ids=torch.arange(batch.mask.numel()).view(batch.mask.shape))


@pytest.mark.parametrize(
    ("lam", "accepted", "rate", "left", "weights"),
    [
        (1.0, [0.6, 1.0, 1.0], 0.8, [0.375, 0.375, 0.25], [0.8, 1.066667, 1.2]),
        (1.5, [0.4, 0.888889, 1.0], 0.666667, [0.3, 0.4, 0.3], [1.0, 1.0, 1.0]),
    ],
)
def test_golden_distributions(
    lam: float, accepted: list[float], rate: float, left: list[float], weights: list[float]
) -> None:
    chance = acceptance((Q / P).log(), lam)
    assert_published(chance.tolist(), accepted)
    z = (P * chance).sum()
    assert_published(z.item(), rate)
    assert_published((P * chance / z).tolist(), left)
    assert_published(accepted_weight((Q / P).log(), z, lam, 9.0).tolist(), weights)
    assert_published(kl(Q, P), 0.083465)
    assert_published(kl(Q, P * chance / z), 0.013569 if lam == 1.0 else 0.0)


@pytest.mark.parametrize("lam", [0.3, 1.0, 1.7, 50.0])
def test_what_is_accepted_and_weighed_is_the_policy(lam: float) -> None:
    """E_p[a] = Z, P = min(p, q / lam) / Z, P times its weight is q, and a larger budget rejects more."""
    rng = generator("cpu", "jackpot", "distributions")
    p, q = (torch.randn(20, 9, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    chance = acceptance((q / p).log(), lam)
    z = (p * chance).sum(-1, keepdim=True)
    left = torch.minimum(p, q / lam) / z
    assert_exact(p * chance / z, left)
    weight = accepted_weight((q / p).log(), z, lam, 1e9)
    assert_exact(left * weight, q)
    assert_exact((left * weight).sum(-1), torch.ones(20, dtype=torch.float64))
    assert (acceptance((q / p).log(), 1.1 * lam) <= chance).all()
    if lam == 1.0:
        assert_exact(z[:, 0], 1.0 - 0.5 * (p - q).abs().sum(-1))  # 1 less the total variation


def test_draws_accept_the_expected_share_and_correct_the_mean() -> None:
    """20000 tokens from P: the kept ones are distributed as min(p, q) / Z, and their weighted mean is that of Q."""
    size = 20_000
    tokens = torch.multinomial(P, size, replacement=True, generator=generator("cpu", "tokens")).view(200, -1)
    ones = torch.ones(200, 100, dtype=torch.float64)
    batch = TokenBatch(
        token_ids=torch.arange(size).view(200, -1), mask=ones.bool(), adv=ones, rollout_logp=P.log()[tokens],
        old_logp=Q.log()[tokens], step=STEP,
    )  # fmt: skip
    memory: Memory = {}
    c = Jackpot().correct(start(batch, 0.2, 0.2), batch, memory)
    assert memory["acceptance"] == pytest.approx(0.8, abs=0.01)
    assert float(c.keep.double().mean()) == pytest.approx(memory["acceptance"], abs=0.01)
    kept = torch.stack([(tokens[c.keep] == v).double().mean() for v in range(3)])
    torch.testing.assert_close(kept, torch.tensor([0.375, 0.375, 0.25], dtype=torch.float64), atol=0.015, rtol=0)
    means = torch.stack([(c.weight * (tokens == v))[c.keep].mean() for v in range(3)])
    torch.testing.assert_close(means, Q, atol=0.015, rtol=0)
    assert (kept - Q).abs().max() > 0.05


def test_equals_a_loop() -> None:
    _, batch = random_batch("jackpot", size=(20, 8), spread=0.8)
    batch = named(batch)
    c = Jackpot(lam=0.8, cap=1.5).correct(start(batch, 0.2, 0.2), batch, {})
    ratio = (batch.old_logp - batch.rollout_logp).exp()
    chance = (ratio / 0.8).clamp(max=1.0)
    rate, drawn = float(chance[batch.mask].mean()), draws(batch, batch.valid)
    for i, t in batch.mask.nonzero().tolist():
        assert bool(c.keep[i, t]) == (float(drawn[i, t]) < float(chance[i, t]))
        assert_exact(c.weight[i, t].item(), min(rate * max(0.8, float(ratio[i, t])), 1.5))
    assert 10 < c.keep.sum() < batch.mask.sum() - 10 and not c.keep[~batch.mask].any()
    logp, _ = random_batch("jackpot", size=(20, 8), spread=0.8)
    plain = objective([], logp, batch)[1]
    found = objective([Jackpot(lam=0.8, cap=1.5)], logp, batch, Algo(denom="original"))[1]
    assert_exact(found, torch.where(c.keep, plain * c.weight, 0.0))


def test_draws_depend_on_the_response_the_step_and_the_seed_and_on_nothing_else() -> None:
    _, batch = random_batch("draws", size=(9, 7))
    batch = named(batch)
    drawn = draws(batch, batch.valid)
    assert (drawn[batch.mask] < 1).all() and (drawn[batch.mask] >= 0).all() and len(drawn[batch.mask].unique()) > 20
    order = torch.tensor([4, 2, 7])
    some = take_batch(batch, order)
    assert torch.equal(draws(some, some.valid), drawn[order])
    pad = torch.nn.functional.pad
    wide = replace(
        batch, **{n: pad(getattr(batch, n), (0, 5)) for n in ("token_ids", "mask", "adv", "rollout_logp", "old_logp")}
    )
    assert torch.equal(draws(wide, wide.valid)[:, :7][batch.mask], drawn[batch.mask])
    for change in ({"index": 1}, {"seed": 1}):
        other = replace(batch, step=replace(STEP, **change))
        assert (draws(other, batch.valid)[batch.mask] != drawn[batch.mask]).all()


def test_equal_policies_are_kept_whole_and_nothing_valid_changes_nothing() -> None:
    _, batch = random_batch("equal")
    same = named(replace(batch, rollout_logp=batch.old_logp))
    memory: Memory = {}
    c = Jackpot().correct(start(same, 0.2, 0.2), same, memory)
    assert torch.equal(c.keep, batch.mask) and (c.weight == 1).all() and memory == {"acceptance": 1.0}
    nothing: Memory = {}
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    before = start(empty, 0.2, 0.2)
    assert Jackpot().correct(before, empty, nothing) is before and nothing == {}


def test_every_position_has_its_own_rate_where_distributions_are_known() -> None:
    _, batch = random_batch("full", spread=0.6)
    tv = torch.rand(batch.mask.shape, generator=generator("cpu", "tv"), dtype=torch.float64) * 0.5
    batch = named(replace(batch, extras={"rollout_tv": torch.where(batch.mask, tv, torch.nan)}))
    part, memory = Jackpot(source="full", cap=9.0), Memory()
    c = part.correct(start(batch, 0.2, 0.2), batch, memory)
    ratio = (batch.old_logp - batch.rollout_logp).exp()
    assert_exact(c.weight[batch.mask], ((1 - tv) * ratio.clamp(min=1.0))[batch.mask])
    assert memory["expected_acceptance"] == pytest.approx(float((1 - tv)[batch.mask].mean()))
    assert torch.equal(c.keep, Jackpot().correct(start(batch, 0.2, 0.2), batch, {}).keep)
    assert part.needs(STEP) == {"rollout_tv"} and Jackpot().needs(STEP) == frozenset()


def test_acceptance_of_a_run_is_about_the_one_that_whole_distributions_say(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=jackpot", "precision=int3", "knobs.Jackpot.source=full", "algo.num_prompts=16"])
    row = grpo_step(run)
    sampled, expected = row["part/Jackpot.acceptance"], row["part/Jackpot.expected_acceptance"]
    assert 0.5 < expected < 0.97 and sampled == pytest.approx(expected, abs=0.05)
    assert row["correction/token_kept_frac"] == pytest.approx(sampled, abs=0.06)


def test_bad_knobs() -> None:
    for knobs, words in (
        ({"lam": 0.0}, r"lam, cap: 0.0, 2.0"), ({"cap": -1.0}, r"lam, cap: 1.0, -1.0"),
        ({"lam": 1.5, "source": "full"}, r"lam: 1.5 with source full"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"Jackpot.{words}"):
            Jackpot(**knobs)  # type: ignore[arg-type]
