"""Truncated sampling of evaluations: transformers' own top-p rule is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.embedded.sampling import nucleus, pick, race_noise


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    from transformers import TopPLogitsWarper

    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    theirs = TopPLogitsWarper(top_p)(torch.zeros(50, 1, dtype=torch.long), logits)  # type: ignore[arg-type]
    torch.testing.assert_close(nucleus(logits.log_softmax(-1), top_p), theirs.log_softmax(-1))


def test_the_whole_distribution_is_left_alone() -> None:
    log_probs = torch.randn(3, 5).log_softmax(-1)
    assert nucleus(log_probs, 1.0) is log_probs


def test_the_one_token_of_a_nucleus_is_drawn_whatever_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's uniforms are 0 once in 2^24 draws. Another token than the only one would have log-prob -inf, which the
    trainer refuses."""

    def zeros(*shape: int, **_: Any) -> Tensor:
        return torch.zeros(*shape)

    log_probs = torch.tensor([[2.0, 1.0, 9.0], [9.0, 2.0, 1.0]]).log_softmax(-1)
    monkeypatch.setattr(torch, "rand", zeros)
    noise = race_noise([(2, torch.Generator())], 3)
    token, logp = pick(nucleus(log_probs, 0.9), noise)
    assert token.tolist() == [2, 0] and logp.tolist() == [0.0, 0.0]
