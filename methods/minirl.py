"""MiniRL: REINFORCE with the whole ratio to the sampler as a constant weight, and a gate on staleness alone.

Paper: arXiv 2512.01374, eq. 7.
Claim: the objective of whole responses equals one of tokens to first order while mismatch and staleness are small. With
importance weights and clipping it is stable; without the weights training collapses, and length normalisation is worse.

    J = sum_t M_t sg[min(pi / mu, 5)] A log pi,   M_t = 0 where A > 0 and r > 1.27, or A < 0 and r < 0.80, else 1

with r = pi / old, both by the trainer, and mu the sampler. Tokens are summed, responses averaged, no KL term. The
weight has the sampler in it, so a correction weight is ignored. The text caps "the token-level IS weight", which in eq.
7 is pi / mu: the cap is on that. Left out: routing replay (`methods.router_replay`); advantages without the
division by the standard deviation, a setting of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from harness.objective.loss import log_ratio
from methods.naive import LOW_BIT


def open_gate(ratio: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    """False where the update pushes a token further that is beyond its bound already, [B, T] bool.

    ratio, adv [B, T] constants; `high` bounds tokens with adv > 0, `low` those with adv < 0, both bounds included.
    """
    return ~(((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low)))


@dataclass(frozen=True, kw_only=True)
class MiniRL(Part):
    """The gate, per update, and the weighted policy gradient."""

    owns_objective: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    """The gate reads the trainer's old policy, which the bypass modes do not compute."""
    cap: float = 5.0
    """Largest weight of a token."""
    low: float = 0.80
    """Smallest current over old ratio of a token with A < 0."""
    high: float = 1.27
    """Largest current over old ratio of a token with A > 0."""

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"MiniRL.cap: {self.cap} cuts the weight of an unchanged policy (choose 1 or more)")
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"MiniRL.low, high: {self.low}, {self.high} is no band (choose 0 <= low <= 1 <= high)")

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        return replace(c, keep=c.keep & open_gate(log_ratio(logp, b.old_logp).exp(), b.adv, self.low, self.high))

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        weight = log_ratio(logp.detach(), b.rollout_logp).exp().clamp(max=self.cap)
        return torch.where(c.keep, -weight * b.adv * logp, 0.0)


METHOD = Method(
    name="minirl",
    paper="arXiv 2512.01374",
    parts=(MiniRL(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-sum",
    mode="decoupled",
    denom="original",
    summary="policy gradient weighted by the capped ratio to the sampler, stale tokens gated",
    claim="with the weight FP8 rollouts train stably under a BF16 trainer, without it they collapse",
    reconstructed="that the cap of 5 is on the whole ratio to the sampler",
)
