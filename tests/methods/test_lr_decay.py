"""Learning-rate decay: the golden table of factors, the surge that starts it, a fixed period, and a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.api import Memory, Step, TokenBatch
from harness.config.compose import advice, compose
from harness.run.loop import grpo_step
from methods.lr_decay import LengthDecay, halvings
from tests.loss_cases import random_batch
from tests.toy import small_config, small_run


def batch_of(step: int, lengths: list[int]) -> TokenBatch:
    """A batch at a step (from 0) whose responses have these lengths."""
    _, batch = random_batch("lengths", size=(len(lengths), 40))
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    return replace(batch, mask=mask, step=Step(index=step, total=9999, seed=0))


def factors(part: LengthDecay, means: list[int], memory: Memory | None = None) -> list[float]:
    """Factors of the steps of a run whose responses have these mean lengths."""
    memory = {} if memory is None else memory
    return [part.update_lr_factor(batch_of(i, [n, n]), memory) for i, n in enumerate(means)]


def test_golden_table_after_a_surge_at_step_110() -> None:
    """Steps counted from 1; the period is 1.8 x 110 = 198."""
    means = [4] * 109 + [13] + [4] * 790
    found = factors(LengthDecay(), means)
    for first, last, factor in ((1, 110, 1.0), (111, 308, 1.0), (309, 506, 0.5), (507, 704, 0.25), (705, 900, 0.125)):
        assert set(found[first - 1 : last]) == {factor}
    memory: Memory = {"surge_step": 110.0, "step": 4998.0, "tokens": 4.0, "responses": 1.0}
    assert LengthDecay().update_lr_factor(batch_of(4999, [4]), memory) == 0.1
    assert all(a >= b for a, b in pairwise(found)) and min(found) >= 0.1


def test_golden_periods_from_the_start() -> None:
    for step, expected in ((199, 1), (198, 0), (397, 2), (396, 1)):
        assert halvings(step - 1, 110, 198, "start") == expected
    memory: Memory = {"surge_step": 110.0, "step": 397.0, "tokens": 1.0, "responses": 1.0}
    assert LengthDecay(counts_from="start").update_lr_factor(batch_of(396, [4]), dict(memory)) == 0.25
    assert LengthDecay().update_lr_factor(batch_of(396, [4]), dict(memory)) == 0.5


def test_the_surge_is_above_three_times_the_baseline_and_found_once() -> None:
    part = LengthDecay(baseline_steps=2, period_factor=1.0)
    memory: Memory = {}
    found = factors(part, [2, 4, 9, 10, 30, 3, 3, 3, 3, 3], memory)  # baseline 3: 9 is no surge, 10 is one
    assert memory["surge_step"] == 4.0
    assert found == [1.0] * 8 + [0.5] * 2  # the first halving comes 4 steps after step 4
    early: Memory = {}
    assert factors(part, [2, 40, 2, 2, 2], early) == [1.0] * 5 and "surge_step" not in early  # within the baseline


def test_without_a_surge_the_rate_is_constant_and_a_fixed_period_halves_from_the_start() -> None:
    assert factors(LengthDecay(baseline_steps=2), [5] * 40) == [1.0] * 40
    fixed = factors(LengthDecay(period=3), [5] * 14)
    assert fixed == [max(0.1, 0.5 ** (i // 3)) for i in range(14)] and fixed[-1] == 0.1


def test_updates_of_a_step_share_its_mean_and_empty_responses_do_not_count() -> None:
    part, memory = LengthDecay(baseline_steps=1, period_factor=0.5), Memory()
    for lengths in ([2, 0, 0], [4, 0]):  # one step of two updates, mean 3
        part.update_lr_factor(batch_of(0, lengths), memory)
    for lengths in ([10], [8, 0]):  # mean 9, not above 3 x 3
        part.update_lr_factor(batch_of(1, lengths), memory)
    part.update_lr_factor(batch_of(2, [10]), memory)
    assert memory["length_sum"] == 3.0 and "surge_step" not in memory
    part.update_lr_factor(batch_of(3, [3]), memory)
    assert memory["surge_step"] == 3.0
    assert all(isinstance(value, float) for value in memory.values())


def test_a_run_halves_its_steps(tmp_path: Path) -> None:
    moved: dict[str, list[float]] = {}
    for words in ("method=naive", "method=lr_decay"):
        run = small_run(tmp_path, [words, "precision=int4", *(["knobs.LengthDecay.period=1"] if "lr" in words else [])])
        before = torch.cat([t.flatten().clone() for _, t in run.trainer.weights()])
        rows = []
        for _ in range(2):
            rows.append(grpo_step(run))
            run.step += 1
            now = torch.cat([t.flatten().clone() for _, t in run.trainer.weights()])
            moved.setdefault(words, []).append(float((now - before).norm()))
            before = now
        assert [row.get("train/lr_factor") for row in rows] == ([1.0, 0.5] if "lr" in words else [None, None])
    naive, decayed = moved["method=naive"], moved["method=lr_decay"]
    assert decayed[0] == naive[0] and decayed[1] == pytest.approx(0.5 * naive[1], rel=1e-3)


@pytest.mark.parametrize(
    ("knobs", "steps"),
    [({}, 144), ({"counts_from": "start"}, 93), ({"counts_from": "start", "period_factor": 0.1}, 52),
     ({"baseline_steps": 2, "period_factor": 1.0}, 7), ({"period": 30}, 31)],
)  # fmt: skip
def test_runs_that_end_before_the_first_halving_are_remarked(knobs: dict[str, Any], steps: int) -> None:
    """With the earliest surge that there can be: by default at step 51, and 92 steps later the rate halves."""
    part = LengthDecay(**knobs)
    found = factors(part, [4] * part.baseline_steps + [13] * steps)
    assert set(found[: steps - 1]) == {1.0} and found[steps - 1] < 1.0
    words = ["method=lr_decay", *(f"knobs.LengthDecay.{name}={value}" for name, value in knobs.items())]
    config = small_config(*words, f"trainer.steps={steps - 1}")
    assert advice(config, compose(config)) == [
        f"LengthDecay changes nothing below {steps} steps, this run has {steps - 1}: raise trainer.steps"
    ]
    config = small_config(*words, f"trainer.steps={steps}")
    assert advice(config, compose(config)) == []


def test_bad_knobs() -> None:
    for knobs, words in (
        ({"baseline_steps": 0}, "baseline_steps: 0"), ({"period": 0}, "period: 0"), ({"floor": 1.5}, "floor: 1.5"),
        ({"surge": 0.0}, "surge, period_factor: 0.0"), ({"period_factor": -1.0}, "surge, period_factor: 3.0, -1.0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"LengthDecay.{words}"):
            LengthDecay(**knobs)
