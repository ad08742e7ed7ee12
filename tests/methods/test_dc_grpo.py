"""DC-GRPO: golden multipliers and shifts, a loop over random batches, and a gradient where the advantage is 0."""

from __future__ import annotations

from dataclasses import replace
from math import exp, nan
from pathlib import Path

import pytest
import torch

from harness.api import Memory
from harness.config.compose import compose
from harness.objective.loss import start
from harness.run.loop import grpo_step
from methods.acrl import probability_gap
from methods.dc_grpo import METHOD, GapCost, next_multiplier
from methods.flashrl import TIS
from tests.loss_cases import assert_exact, assert_published, corrected, random_batch, response
from tests.objective_cases import objective
from tests.toy import small_config, small_run


def test_golden_multipliers() -> None:
    lam, found = 0.1, list[float]()
    for cost in (0.0037, 0.0057, 0.0017, 0.5):
        lam = next_multiplier(lam, cost, 0.0037, 1.0, 0.0, 1.0)
        found.append(lam)
    assert found == pytest.approx([0.1, 0.102, 0.1, 0.5963], abs=1e-12)
    assert next_multiplier(0.001, 0.0, 0.0037, 1.0, 0.0, 1.0) == 0.0
    assert next_multiplier(0.9, 0.9, 0.0037, 1.0, 0.0, 1.0) == 1.0


def test_golden_gaps_and_shifted_advantages() -> None:
    logp, batch = response([-0.5, -2.0, -0.01], old=[-0.5, -2.0, -0.01], rollout=[-0.6, -1.9, -0.01], adv=1.0)
    gap, valid = probability_gap(batch)
    assert_published(gap, torch.tensor([[0.057719, 0.014233, 0.0]], dtype=torch.float64))
    assert_published((gap.sum() / valid.sum()).item(), 0.023984)
    memory: Memory = {}
    c = GapCost().correct(start(batch, 0.2, 0.2), batch, memory)
    assert c.adv_shift is not None
    assert_published(c.adv_shift, torch.tensor([[-0.0057719, -0.0014233, 0.0]], dtype=torch.float64))
    assert memory == pytest.approx({"gap": 0.023984, "lam": 0.1 + 0.023984 - 0.0037}, abs=1e-6)
    for adv, shifted in ((1.0, 0.995), (-1.0, -1.005)):
        q = exp(-1.0) + 0.05
        logp, batch = response([-1.0], old=[-1.0], rollout=[float(torch.tensor(q).double().log())], adv=adv)
        assert_published(objective(METHOD.parts, logp, batch)[1].item(), -shifted)


def test_the_step_has_the_multiplier_from_before_and_the_next_one_the_new() -> None:
    _, batch = random_batch("twice", spread=0.6)
    gap, valid = probability_gap(batch)
    mean, memory, part = float(gap.sum() / valid.sum()), Memory(), GapCost(lam=0.2, level=0.05, eta=2.0)
    first, second = (part.correct(start(batch, 0.2, 0.2), batch, memory).adv_shift for _ in range(2))
    assert first is not None and second is not None
    assert_exact(first, -0.2 * gap)
    assert_exact(second, -(0.2 + 2.0 * (mean - 0.05)) * gap)


def test_equals_a_loop() -> None:
    logp, batch = random_batch("dc_grpo", size=(12, 8), spread=0.8)
    slopes, count = torch.zeros_like(logp), int(batch.mask.sum())
    for i, t in batch.mask.nonzero().tolist():
        adv, now, old, sampled = (x[i, t].item() for x in (batch.adv, logp, batch.old_logp, batch.rollout_logp))
        adv -= 0.5 * abs(exp(old) - exp(sampled))
        ratio = exp(now - old)
        if (adv > 0 and ratio <= 1.2) or (adv < 0 and 0.8 <= ratio <= 3.0):
            slopes[i, t] = -adv * ratio / count
    assert_exact(objective([GapCost(lam=0.5)], logp, batch)[1], slopes)


def test_it_acts_where_no_weight_can_and_never_raises_an_advantage() -> None:
    logp, batch = random_batch("zero", spread=0.8)
    zero = replace(batch, adv=torch.zeros_like(batch.adv), old_logp=logp.detach())
    found = objective(METHOD.parts, logp, zero)[1]
    assert (found[batch.mask] > 0).all() and (objective([TIS()], logp, zero)[1] == 0).all()
    shift = corrected([GapCost(lam=0.7)], batch).adv_shift
    assert shift is not None and (shift <= 0).all() and (shift >= -0.7).all() and not shift.requires_grad


def test_equal_policies_keep_the_advantage_and_lower_the_multiplier() -> None:
    _, batch = random_batch("equal")
    batch = replace(batch, rollout_logp=batch.old_logp)
    memory: Memory = {}
    c = GapCost().correct(start(batch, 0.2, 0.2), batch, memory)
    assert c.adv_shift is not None and (c.adv_shift == 0).all() and memory["lam"] == pytest.approx(0.1 - 0.0037)


def test_invalid_tokens_padding_and_a_shift_of_another_part() -> None:
    _, batch = random_batch("invalid", spread=0.5)
    rollout = torch.where(batch.mask, batch.rollout_logp, nan)
    rollout[0, 0] = nan
    spoilt = replace(batch, rollout_logp=rollout)
    memory: Memory = {}
    given = replace(start(spoilt, 0.2, 0.2), adv_shift=torch.full_like(batch.adv, 0.25))
    c = GapCost().correct(given, spoilt, memory)
    gap, valid = probability_gap(spoilt)
    assert c.adv_shift is not None and torch.isfinite(c.adv_shift).all() and c.adv_shift[0, 0] == 0.25
    assert_exact(c.adv_shift, 0.25 - 0.1 * gap)
    assert memory["gap"] == pytest.approx(float(gap[valid].mean()))
    nothing: Memory = {}
    GapCost().correct(start(batch, 0.2, 0.2), replace(batch, mask=torch.zeros_like(batch.mask)), nothing)
    assert nothing == {}


def test_a_run_carries_the_multiplier_from_step_to_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=dc_grpo", "precision=int3"])
    lam = 0.1
    for _ in range(3):
        row = grpo_step(run)
        run.step += 1
        lam = min(max(lam + row["part/GapCost.gap"] - 0.0037, 0.0), 1.0)
        assert row["part/GapCost.lam"] == pytest.approx(lam, abs=1e-9)
        assert row["part/GapCost.gap"] == pytest.approx(row["mismatch/prob_absdiff_mean"], rel=1e-4)
    assert lam > 0.15


def test_refusals() -> None:
    for knobs, words in (
        ({"lam": 2.0}, r"lam_min, lam, lam_max: 0.0, 2.0, 1.0"), ({"lam_min": -1.0}, r"lam_min, lam, lam_max: -1.0"),
        ({"level": -1.0}, r"level, eta: -1.0"), ({"eta": -0.5}, r"level, eta: 0.0037, -0.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"GapCost.{words}"):
            GapCost(**knobs)
    with pytest.raises(ValueError, match=r"algo.mode=bypass_pg: GapCost needs decoupled"):
        compose(small_config("method=naive", "parts=[dc_grpo.GapCost]", "algo.mode=bypass_pg"))
