"""A policy that can be enumerated (3 tokens, 2 positions): the true gradient and every expectation are exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.api import Step, TokenBatch
from harness.config.schema import AlgoConfig
from harness.foundation.seeds import generator
from harness.studies.replay.arms import arms_of, pull
from harness.studies.replay.moments import Moments, compare

ALGO = AlgoConfig(name="plain", agg="seq-mean-token-sum")
WORDS = torch.cartesian_prod(torch.arange(3), torch.arange(3))
"""[9, 2]: every response."""
THETA = torch.tensor([0.2, -0.1, 0.4, 0.3, 0.0, -0.5, 1.0, 0.1, -0.2, 0.0, 0.6, -0.3], dtype=torch.float64)
SHIFT = 0.7 * torch.tensor([1.0, -1.0, 0.5, 0.0, 1.0, -1.0, 0.3, -0.6, 0.9, -1.0, 0.2, 0.4], dtype=torch.float64)
ARMS = arms_of(ALGO)[0]
ADV = torch.tensor([1.0, -0.5, 0.2, -1.0, 0.8, -0.3, 0.4, -0.9, 0.6], dtype=torch.float64)
"""A fixed advantage per response, so that nothing but the sampler differs."""


def logp_of(theta: Tensor, words: Tensor) -> Tensor:
    """[B, 2]: first token from theta[:3], second from the row of theta[3:] that the first one names."""
    first = theta[:3].log_softmax(-1)[words[:, 0]]
    second = theta[3:].view(3, 3).log_softmax(-1)[words[:, 0], words[:, 1]]
    return torch.stack([first, second], 1)


def gradient(arm_name: str, words: Tensor, behaviour: Tensor, row_weight: Tensor | None = None) -> np.ndarray:
    """The ascent direction of an arm on the responses `words`, by the laboratory's own pulls.

    `row_weight` [B] turns the mean over rows into an expectation.
    """
    theta = THETA.clone().requires_grad_()
    logp = logp_of(theta, words)
    mask = torch.ones(words.shape, dtype=torch.bool)
    adv = ADV[3 * words[:, 0] + words[:, 1]][:, None].expand(words.shape)
    batch = TokenBatch(
        token_ids=words, mask=mask, adv=adv, rollout_logp=logp_of(behaviour, words), old_logp=logp.detach(),
        step=Step(index=0, total=1, seed=0),
        extras={name: torch.zeros(words.shape) for name in ("ref_logp", "rollout_kl")}, shadow={"old": logp.detach()},
    )  # fmt: skip
    arm = next(one for one in ARMS if one.name == arm_name)
    pulled = -pull(replace(arm, algo=ALGO), batch, logp.detach(), 2).grad
    if row_weight is not None:
        pulled = pulled * row_weight[:, None]
    (found,) = torch.autograd.grad((pulled * logp).sum(), theta)
    return found.numpy()


def probability(theta: Tensor) -> Tensor:
    return logp_of(theta, WORDS).sum(1).exp()


def true_gradient() -> np.ndarray:
    """d/d theta of sum over responses of p(x) A(x), by enumeration."""
    theta = THETA.clone().requires_grad_()
    (found,) = torch.autograd.grad((logp_of(theta, WORDS).sum(1).exp() * ADV).sum(), theta)
    return found.numpy()


def expected(arm_name: str, behaviour: Tensor) -> np.ndarray:
    return gradient(arm_name, WORDS, behaviour, 9 * probability(behaviour))


def known_bias() -> np.ndarray:
    """Bias without a correction: sum over responses of (q - p) A grad log p."""
    theta = THETA.clone().requires_grad_()
    gap = (probability(THETA + SHIFT) - probability(THETA)) * ADV
    (found,) = torch.autograd.grad((gap * logp_of(theta, WORDS).sum(1)).sum(), theta)
    return found.numpy()


def test_expectations_are_the_known_ones() -> None:
    other = THETA + SHIFT
    np.testing.assert_allclose(expected("none", THETA), true_gradient(), atol=1e-12)
    np.testing.assert_allclose(expected("none", other) - true_gradient(), known_bias(), atol=1e-12)
    np.testing.assert_allclose(expected("sequence IS, no cap", other), true_gradient(), atol=1e-12)
    size = np.linalg.norm(true_gradient())
    # a token's own ratio is not enough: what came before and after it was sampled elsewhere too
    assert np.linalg.norm(expected("token IS, no cap", other) - true_gradient()) > 0.1 * size
    assert np.linalg.norm(known_bias()) > 0.3 * size


def sampled(arm: str, behaviour: Tensor, name: str, num_batches: int, size: int = 128) -> np.ndarray:
    """[S, 12]: gradients of batches sampled from `behaviour`."""
    draws = generator("cpu", "replay estimand", name)
    rows = torch.multinomial(probability(behaviour), num_batches * size, replacement=True, generator=draws)
    return np.stack([gradient(arm, WORDS[part], behaviour) for part in rows.split(size)])


def experiment(index: int, arm: str, behaviour: Tensor) -> Moments:
    """12 batches of 128 responses against 36 of the exact sampler, all independent."""
    r = sampled("none", THETA, f"reference {index}", 36)
    q = sampled(arm, behaviour, f"{arm} {index}", 12)
    return compare(q, r, r @ r.T, np.random.default_rng(index), 500)


def test_the_uncorrected_estimator_has_the_known_bias() -> None:
    """Over 8 experiments: intervals hold the truth (at least 6, of 95 % each), and 0 never."""
    total, size = true_gradient() + known_bias(), np.linalg.norm(true_gradient())
    gain = total @ true_gradient() / size**2
    truth = {"bias": np.linalg.norm(known_bias()) / size, "gain": gain, "cosine": gain * size / np.linalg.norm(total)}
    found = [experiment(i, "none", THETA + SHIFT) for i in range(8)]
    for name, value in truth.items():
        intervals = [getattr(one, name) for one in found]
        assert sum(interval.low < value < interval.high for interval in intervals) >= 6, name
        assert np.mean([interval.value for interval in intervals]) == pytest.approx(value, rel=0.1)
    assert all(one.p_zero < 0.01 and one.bias.low > 0 for one in found)


@pytest.mark.parametrize(
    ("arm", "shift", "ratio"), [("none", 0.0, 1.0), ("sequence IS, no cap", 1.0, 2.3), ("token IS, no cap", 1.0, None)]
)
def test_the_exact_sampler_and_whole_sequence_weights_have_no_bias(arm: str, shift: float, ratio: float | None) -> None:
    """Over 8 experiments: intervals hold 0 (at most one misses it, 2.5 % each), and the weights cost variance."""
    found = [experiment(i, arm, THETA + shift * SHIFT) for i in range(8)]
    missed = sum(one.bias.low > 0 for one in found)
    if ratio is None:  # the control: token weights alone are biased here
        assert missed >= 4
        return
    assert missed <= 1
    assert np.mean([one.gain.value for one in found]) == pytest.approx(1.0, abs=0.1)
    assert np.mean([one.cosine.value for one in found]) > 0.97
    assert np.mean([one.variance_ratio for one in found]) == pytest.approx(ratio, rel=0.25)
