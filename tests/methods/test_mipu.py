"""MIPU, step 1: the golden tokens of the weight outside the clip, at the level of responses and of tokens."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
import torch

from methods.flashrl import TIS
from methods.mipu import METHOD
from tests.loss_cases import Algo, assert_exact, assert_published, corrected, random_batch, response
from tests.objective_cases import objective


@pytest.mark.parametrize(
    ("rollout", "logp", "adv", "gain"),
    [
        (-1.2, -0.9, 1.0, 1.349859),
        (-3.0, -1.0, 1.0, 2.0),
        (-1.0, -0.7, 1.0, 1.2),
        (-1.0, -1.3, -1.0, -0.8),
    ],
)
def test_golden_tokens(rollout: float, logp: float, adv: float, gain: float) -> None:
    """J of a response of one token, where both levels are the same."""
    current, batch = response([logp], old=[-1.0], rollout=[rollout], adv=adv)
    for part in (*METHOD.parts, TIS(cap=2.0, level="token")):
        assert_published(objective([part], current, batch)[0].item(), -gain)


def test_the_weight_of_a_response_is_its_geometric_mean() -> None:
    _, batch = response([-1.0, -1.0], old=[-1.0, -1.0], rollout=[-0.9, -1.2], adv=1.0)
    assert_published(corrected(METHOD.parts, batch).weight, torch.full((1, 2), 1.051271, dtype=torch.float64))
    token = corrected([TIS(cap=2.0, level="token")], batch).weight
    assert_exact(token, torch.tensor([[exp(-0.1), exp(0.2)]], dtype=torch.float64))


def test_equals_a_loop() -> None:
    logp, batch = random_batch("mipu", size=(16, 8), spread=1.2)
    total, slopes, num_capped = 0.0, torch.zeros_like(logp), 0
    for i, row in enumerate(batch.mask):
        places = row.nonzero().flatten().tolist()
        if not places:
            continue
        mean = sum(float(batch.old_logp[i, t] - batch.rollout_logp[i, t]) for t in places) / len(places)
        weight = min(exp(mean), 2.0)
        num_capped += exp(mean) > 2.0
        for t in places:
            adv, ratio = float(batch.adv[i, t]), exp(float(logp.detach()[i, t] - batch.old_logp[i, t]))
            clipped = min(max(ratio, 0.8), 1.2)
            total -= weight * min(ratio * adv, clipped * adv)
            if ratio * adv <= clipped * adv:
                slopes[i, t] = -weight * ratio * adv
    count = int(batch.mask.sum())
    assert num_capped > 0
    value, grad = objective(METHOD.parts, logp, batch, Algo(dual_clip=None))
    assert_exact(value.item(), total / count)
    assert_exact(grad, slopes / count)


def test_long_responses_weigh_no_more() -> None:
    _, batch = random_batch("equal")
    uniform = replace(batch, rollout_logp=batch.old_logp - 0.3)
    weight = corrected(METHOD.parts, uniform).weight
    assert_exact(weight[batch.mask], torch.full_like(weight[batch.mask], exp(0.3)))
    product = corrected([TIS(cap=1e9, level="sequence")], uniform).weight
    assert_exact(product[:, 0], (0.3 * batch.mask.sum(-1).double()).exp())
