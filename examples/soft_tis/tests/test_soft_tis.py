"""The rule by hand, and the identity on equal policies."""

from __future__ import annotations

import pytest
import torch
from lowbit_soft_tis import METHOD, SoftTIS, soft_weight

from harness.api import Step, TokenBatch
from harness.objective.loss import start
from methods import METHODS


def test_weights_by_hand() -> None:
    rho = torch.tensor([0.0, 0.5, 1.0, 3.0, 1e9])
    torch.testing.assert_close(soft_weight(rho, 2.0), torch.tensor([0.0, 2 / 3, 1.0, 1.5, 2.0]))


def test_equal_policies_are_left_alone() -> None:
    logp, mask = torch.full((2, 3), -1.5), torch.ones(2, 3).bool()
    batch = TokenBatch(
        token_ids=torch.zeros(2, 3).long(), mask=mask, adv=logp, rollout_logp=logp, old_logp=logp,
        step=Step(index=0, total=1, seed=0),
    )  # fmt: skip
    memory: dict[str, float] = {}
    c = SoftTIS().correct(start(batch, 0.2, 0.28), batch, memory)
    assert torch.equal(c.weight, torch.ones(2, 3)) and memory == {"weight_max": 1.0}


def test_it_is_registered_by_its_entry_point() -> None:
    assert METHODS["soft_tis"] == METHOD


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SoftTIS\.cap: 0\.5 does not exceed 1"):
        SoftTIS(cap=0.5)
