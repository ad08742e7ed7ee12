"""The band by hand, for the coarse sampler alone, and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lowbit_two_samplers import METHOD, FineSampler, in_band

from harness.api import Plan, Step, TokenBatch
from harness.numerics.formats import format_named
from harness.objective.loss import start
from methods import METHODS


def test_the_band_by_hand() -> None:
    rho = torch.tensor([[0.4, 0.51, 1.0, 1.9, 2.1]])
    assert in_band(rho.log(), 2.0).tolist() == [[False, True, True, True, False]]


def test_the_band_is_for_the_coarse_sampler_alone() -> None:
    gap = torch.tensor([0.0, 0.5, 3.0])
    old, mask = torch.full((2, 3), -1.5), torch.tensor([[True, True, True], [True, True, False]])
    batch = TokenBatch(
        token_ids=torch.zeros(2, 3).long(), mask=mask, adv=old, old_logp=old, rollout_logp=old - gap,
        step=Step(index=0, total=1, seed=0), sampler=torch.tensor([0, 1]),
    )  # fmt: skip
    memory: dict[str, float] = {}
    c = FineSampler().correct(start(batch, 0.2, 0.28), batch, memory)
    assert c.keep.tolist() == [[True, True, False], [True, True, False]] and memory == {"kept_frac": 0.8}
    alone = replace(batch, sampler=None, rollout_logp=old)
    assert torch.equal(FineSampler().correct(start(alone, 0.2, 0.28), alone, {}).keep, mask)


def test_the_plan_names_the_second_sampler() -> None:
    samplers = FineSampler(share=0.5).plan(Plan()).samplers
    assert samplers is not None and len(samplers) == 1
    (fine,) = samplers
    assert (fine.name, fine.share, fine.weights) == ("fine", 0.5, format_named("int8_channel"))


def test_it_is_registered_by_its_entry_point_and_checks_its_band() -> None:
    assert METHODS["two_samplers"] == METHOD
    with pytest.raises(ValueError, match=r"FineSampler\.bound: 1\.0 does not exceed 1"):
        FineSampler(bound=1.0)
