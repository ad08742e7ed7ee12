"""Log-probabilities that an engine gave of what it sampled: refused where they are none, in training and evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.api import Rollout


def check_engine_logp(logp: Tensor, sampled: Tensor, beside: str = "") -> None:
    """Raises RuntimeError where a sampled token has a log-prob of NaN: that engine's tokens are worth nothing. `logp`
    [B, T] float32 nats, `sampled` [B, T] bool; `beside`: the end of the message."""
    if num_nan := int((logp.isnan() & sampled).sum()):
        raise RuntimeError(f"the engine's log-probs of {num_nan} of {int(sampled.sum())} tokens are NaN{beside}")


def check_answers(rollout: Rollout) -> None:
    """`check_engine_logp` of the answers to an evaluation."""
    places = torch.arange(rollout.logp.shape[1], device=rollout.logp.device)
    check_engine_logp(rollout.logp, places < rollout.lengths.to(places.device)[:, None])
