"""Truncated sampling of evaluations: transformers' own top-p rule is the oracle."""

from __future__ import annotations

import pytest
import torch

from harness.engines.embedded.sampling import nucleus


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    from transformers import TopPLogitsWarper

    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    theirs = TopPLogitsWarper(top_p)(torch.zeros(50, 1, dtype=torch.long), logits)  # type: ignore[arg-type]
    torch.testing.assert_close(nucleus(logits.log_softmax(-1), top_p), theirs.log_softmax(-1))


def test_the_whole_distribution_is_left_alone() -> None:
    log_probs = torch.randn(3, 5).log_softmax(-1)
    assert nucleus(log_probs, 1.0) is log_probs
