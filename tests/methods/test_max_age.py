"""prime-rl's bound on age: its golden table, groups that share their oldest token, a run whose data grows too old."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.objective.loss import start
from harness.run.loop import grpo_step
from methods.max_age import MaxAge, prompt_age
from tests.loss_cases import random_batch
from tests.toy import small_run


def test_golden_ages() -> None:
    """prime-rl at step 10, which trains on version 9: start 0 is 9 steps old and dropped, 1 is kept, 9 has age 0."""
    version, mask = torch.tensor([[0, 9], [1, 9], [9, 9]]), torch.ones(3, 2, dtype=torch.bool)
    assert prompt_age(version, mask, torch.arange(3), 9).tolist() == [9, 8, 0]
    _, batch = random_batch("age", size=(3, 2))
    batch = replace(batch, mask=mask, version=version, group=torch.arange(3), step=replace(batch.step, index=9))
    kept = MaxAge().correct(start(batch, 0.2, 0.2), batch, {}).keep
    assert kept.tolist() == [[False, False], [True, True], [True, True]]


def test_responses_of_a_prompt_share_their_oldest_token_and_padding_has_no_age() -> None:
    version = torch.tensor([[5, 5, 0], [3, 5, 5], [5, 5, 5], [0, 0, 0]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True], [False, False, False]])
    assert prompt_age(version, mask, torch.tensor([1, 1, 0, 2]), 5).tolist() == [2, 2, 0, 0]
    assert prompt_age(version, mask, torch.tensor([0, 1, 2, 3]), 5).tolist() == [0, 2, 0, 0]
    with pytest.raises(ValueError, match=r"^MaxAge\.steps: -1"):
        MaxAge(steps=-1)


def test_a_stale_run_loses_all_its_tokens_at_a_bound_below_its_age(tmp_path: Path) -> None:
    """With staleness 2 batches have ages 0, 1, 2, 2: a bound of 1 keeps the first two."""
    run = small_run(tmp_path, ["method=max_age", "precision=bf16", "algo.staleness=2", "knobs.MaxAge.steps=1"])
    kept, norms = list[float](), list[float]()
    for _ in range(4):
        row = grpo_step(run)
        run.step += 1
        kept.append(row["correction/token_kept_frac"])
        norms.append(row["train/grad_norm"])
    assert kept == [1.0, 1.0, 0.0, 0.0]
    assert min(norms[:2]) > 0 == max(norms[2:])
