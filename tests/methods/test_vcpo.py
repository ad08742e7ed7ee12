"""VCPO: golden effective sample sizes and factors, numpy on random weights, and the step that a run really takes."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.api import Memory
from harness.objective.loss import start
from harness.run.loop import grpo_step
from methods.vcpo import ESSStep, OptimalBaseline, ess_share, least_variance_baseline, step_factor
from tests.loss_cases import assert_published, random_batch
from tests.toy import small_run


def logs(weights: list[float]) -> torch.Tensor:
    """Log-weights [B]."""
    return torch.tensor(weights, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("weights", "share", "sqrt", "linear"),
    [
        ([4.0, 1.0, 1.0, 1.0], 0.644737, 0.802955, 0.644737),
        ([8.0, 0.1, 0.1, 0.1], 0.268975, 0.518628, 0.268975),
        ([1e-4] * 4, 1.0, 1.0, 1.0),
    ],
)
def test_golden_shares_and_factors(weights: list[float], share: float, sqrt: float, linear: float) -> None:
    """The last row is 0.8 in the authors' code, whose absolute 1e-8 is as large as the squares."""
    q = ess_share(logs(weights))
    assert_published(q, share)
    assert_published(step_factor(q, 1.0, "sqrt"), sqrt)
    assert_published(step_factor(q, 1.0, "linear"), linear)


def test_golden_reference_share() -> None:
    q = ess_share(logs([8.0, 0.1, 0.1, 0.1]))
    assert_published(step_factor(q, 0.5, "sqrt"), 0.733451)
    assert step_factor(q, 0.25, "sqrt") == step_factor(q, 0.25, "linear") == 1.0


def test_shares_of_random_weights() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 64):
        log_w = rng.normal(0, 2, size)
        w = np.exp(log_w)
        q = ess_share(torch.tensor(log_w))
        assert q == pytest.approx(w.sum() ** 2 / (w**2).sum() / size, rel=1e-12)
        assert 1 / size <= q * (1 + 1e-12) and q <= 1 + 1e-12
        for shift in (-600.0, 600.0):
            assert ess_share(torch.tensor(log_w + shift)) == pytest.approx(q, rel=1e-10)
        assert ess_share(torch.full((size,), float(log_w[0]))) == pytest.approx(1.0, rel=1e-12)
    assert ess_share(torch.tensor([])) == 0.0 and step_factor(0.0, 1.0, "sqrt") == 0.0


def test_weights_of_responses_are_products_over_their_tokens() -> None:
    _, batch = random_batch("vcpo", size=(12, 6), spread=0.7)
    gaps = np.where(batch.mask, batch.old_logp - batch.rollout_logp, 0.0).sum(1)[batch.mask.any(1).numpy()]
    w, memory = np.exp(gaps), Memory()
    expected = w.sum() ** 2 / (w**2).sum() / len(w)
    assert ESSStep(rule="linear").update_lr_factor(batch, memory) == pytest.approx(expected, rel=1e-10)
    assert memory == {"ess_share": pytest.approx(expected)} and expected < 0.6
    capped = np.minimum(w, 1.2)
    found = ESSStep(cap=1.2).update_lr_factor(batch, {})
    assert found == pytest.approx((capped.sum() ** 2 / (capped**2).sum() / len(w)) ** 0.5, rel=1e-10)
    far = replace(batch, rollout_logp=batch.rollout_logp - 50.0)  # no clamp: only differences count, by length here
    assert ESSStep().update_lr_factor(far, {}) < 0.5
    spoilt = replace(batch, rollout_logp=torch.where(batch.mask, batch.rollout_logp, nan))
    assert ESSStep(rule="linear").update_lr_factor(spoilt, {}) == pytest.approx(expected, rel=1e-10)


def test_equal_policies_take_the_whole_step_and_nothing_to_count_none() -> None:
    _, batch = random_batch("equal")
    assert ESSStep().update_lr_factor(replace(batch, rollout_logp=batch.old_logp), {}) == 1.0
    assert ESSStep().update_lr_factor(replace(batch, mask=torch.zeros_like(batch.mask)), {}) == 0.0


def test_a_run_takes_the_step_that_the_share_says(tmp_path: Path) -> None:
    """Under Adam: the first update of the run with the part is that of the run without it, times the factor."""
    words = ["precision=int2", "method=naive", "knobs.TIS.cap=8.0", "knobs.TIS.level=sequence"]
    moves: dict[str, dict[str, torch.Tensor]] = {}
    for parts in ("flashrl.TIS", "flashrl.TIS,vcpo.ESSStep"):
        run = small_run(tmp_path, [*words, f"parts=[{parts}]", "algo.eps_low=1.0", "algo.eps_high=1e9"])
        before = {name: t.clone() for name, t in run.trainer.weights()}
        row = grpo_step(run)
        moves[parts] = {name: t - before[name] for name, t in run.trainer.weights()}
        if "ESSStep" in parts:
            assert row["train/lr_factor"] == pytest.approx(row["part/ESSStep.ess_share"] ** 0.5)
            assert 1 / 16 <= row["part/ESSStep.ess_share"] < 0.9
            for name, moved in moves[parts].items():
                plain = moves["flashrl.TIS"][name]
                torch.testing.assert_close(moved, plain * row["train/lr_factor"], rtol=1e-3, atol=2e-7)
        else:
            assert "train/lr_factor" not in row


def test_bad_knobs() -> None:
    for knobs, words in (
        ({"q0": 0.0}, r"ESSStep.q0: 0.0"), ({"q0": 1.5}, r"ESSStep.q0: 1.5"), ({"cap": 0.0}, r"ESSStep.cap: 0.0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            ESSStep(**knobs)


@pytest.mark.parametrize(
    ("reward", "weights", "norms", "baseline"),
    [
        ([1.0, 0.0], [2.0, 0.5], [1.0, 2.0], 0.8),
        ([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 2.0, 0.5], [1.0, 1.0, 0.5, 2.0], 0.5),
        ([1.0, 0.0], [2.0, 0.5], [1.0, 1.0], 4.0 / 4.25),
    ],
)
def test_golden_baseline(reward: list[float], weights: list[float], norms: list[float], baseline: float) -> None:
    r, group = torch.tensor(reward, dtype=torch.float64), torch.zeros(len(reward), dtype=torch.int64)
    found = least_variance_baseline(r, logs(weights), logs(norms), group)
    assert_published(found, torch.full_like(r, baseline))
    assert_published(least_variance_baseline(r, logs(weights) + 300, logs(norms) - 50, group), found)
    w2 = (torch.tensor(weights) * torch.tensor(norms)).double().square()
    least = (w2 * (r - baseline).square()).sum()
    assert all(least < (w2 * (r - baseline - d).square()).sum() for d in (-0.01, 0.01))


def test_the_shift_is_from_the_mean_of_each_prompt_to_its_baseline() -> None:
    """By a loop over prompts; an empty row counts nowhere, equal weights shift nothing."""
    _, batch = random_batch("baseline", size=(12, 6), spread=0.6)
    batch = replace(batch, group=torch.arange(12) // 4)
    memory: Memory = {}
    shift = OptimalBaseline().correct(start(batch, 0.2, 0.2), batch, memory).adv_shift
    assert shift is not None
    for group in range(3):
        rows = [i for i in range(4 * group, 4 * group + 4) if batch.mask[i].any()]
        d = [float((batch.old_logp - batch.rollout_logp)[i][batch.mask[i]].sum()) for i in rows]
        w2 = np.exp(2 * np.array(d))
        adv = np.array([float(batch.adv[i, 0]) for i in rows])
        expected = adv.mean() - (w2 * adv).sum() / w2.sum()
        for i in rows:
            assert shift[i].tolist() == pytest.approx([expected] * 6, rel=1e-9)
    assert (shift[-1] == 0).all() and memory["shift"] > 0.05
    same = replace(batch, rollout_logp=batch.old_logp)
    found = OptimalBaseline().correct(start(same, 0.2, 0.2), same, {}).adv_shift
    assert found is not None and found.abs().max() < 1e-12


def test_a_run_with_the_baseline_differs_by_it_alone(tmp_path: Path) -> None:
    rows = [
        grpo_step(small_run(tmp_path, [f"method={name}", "precision=int4", "algo.num_prompts=16"]))
        for name in ("vcpo", "vcpo_baseline")
    ]
    assert (
        rows[0]["mismatch/kl_k3"] == rows[1]["mismatch/kl_k3"]
        and rows[0]["train/lr_factor"] == rows[1]["train/lr_factor"]
    )
    assert rows[0]["train/grad_norm"] != rows[1]["train/grad_norm"]
    assert rows[1]["part/OptimalBaseline.shift"] > 1e-3
