"""SAPO: a smooth gate on the policy ratio in place of the clip (arXiv 2511.20347).

Claim: a sigmoid keeps the tokens of a sequence that stay near the old policy where a hard clip drops them all, and a
steeper gate for negative advantages keeps training stable for longer.

    f(r) = (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg;   loss -f(r) A

The gradient with respect to log pi is -4 p (1 - p) r A with p = sigmoid(tau (r - 1)). The factor 4 p (1 - p) is 1 at r
= 1, so that PPO's gradient is left there, and falls on both sides. Nothing is clipped. r is current over old policy, so
a correction weight multiplies it, after the gate (verl). tau 1.0 and 1.05 are TRL's defaults and, by notes, the
paper's. log r is clamped to +-20 as in verl; TRL does not clamp. Left out: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Method, Part, TokenBatch
from harness.objective.loss import log_ratio
from methods.naive import LOW_BIT


def gated(ratio: Tensor, tau: Tensor) -> Tensor:
    """f(r) = (4 / tau) sigmoid(tau (r - 1)), in (0, 4 / tau); ratio [B, T] with gradient, tau [B, T] constant."""
    return 4.0 / tau * (tau * (ratio - 1.0)).sigmoid()


@dataclass(frozen=True, kw_only=True)
class SAPO(Part):
    """The gate in place of the clipped surrogate."""

    modes: ClassVar[tuple[str, ...]] = ("decoupled", "bypass_ppo")
    """bypass_pg weighs by the current policy, which the gate has in it already."""
    tau_pos: float = 1.0
    """Steepness of the gate for A > 0."""
    tau_neg: float = 1.05
    """Steepness of the gate for A <= 0."""

    def __post_init__(self) -> None:
        if min(self.tau_pos, self.tau_neg) <= 0:
            raise ValueError(f"SAPO.tau_pos, tau_neg: {self.tau_pos}, {self.tau_neg} must be above 0")

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        tau = torch.full_like(b.adv, self.tau_neg).masked_fill(b.adv > 0, self.tau_pos)
        return -gated(log_ratio(logp, b.old_logp).exp(), tau) * b.adv


METHOD = Method(
    name="sapo",
    paper="arXiv 2511.20347",
    parts=(SAPO(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-mean",
    mode="decoupled",
    summary="a smooth gate on the policy ratio in place of the clip, steeper for negative advantages",
    claim="a soft gate trains longer without collapse than a hard clip of tokens or sequences",
)
