"""IPO, prime-rl's loss: a differentiable ratio to the sampler, masked by the change of probability on either side.

Code: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/loss.py `ipo_loss_fn`. Claim: none published.

    R = pi / mu,  keep = |pi - mu| <= 0.1;   loss = -keep tau A R + kappa (log R)^2

The mask does not ask for the sign of the advantage, unlike DPPO's (`methods.dppo`). The squared term runs over every
token, masked or not, and both divide by the tokens of the whole batch. The ratio has the sampler in it, so a correction
weight is ignored. log R is clamped to +-20 in the first term; prime-rl does not clamp. Left out: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from harness.objective.loss import log_ratio
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class IPO(Part):
    """The mask, per update, and the loss with its squared penalty."""

    owns_objective: ClassVar[bool] = True
    threshold: float = 0.1
    """Largest change of the sampled token's probability, current policy against sampler."""
    tau: float = 1.0
    """Factor on the advantage."""
    kappa: float = 1e-3
    """Coefficient of (log R)^2 over all tokens."""

    def __post_init__(self) -> None:
        if min(self.threshold, self.tau) <= 0:
            raise ValueError(f"IPO.threshold, tau: {self.threshold}, {self.tau} (choose above 0)")
        if self.kappa < 0:
            raise ValueError(f"IPO.kappa: {self.kappa} is negative (choose 0 or more)")

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        return replace(c, keep=c.keep & ((logp.exp() - b.rollout_logp.exp()).abs() <= self.threshold))

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        gain = self.tau * b.adv * log_ratio(logp, b.rollout_logp).exp()
        return torch.where(c.keep, -gain, 0.0) + self.kappa * (logp - b.rollout_logp).square()


METHOD = Method(
    name="ipo",
    paper="prime-rl, ipo_loss_fn",
    parts=(IPO(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="token-mean",
    denom="original",
    summary="ratio to the sampler, tokens whose probability moved by more than 0.1 masked, a squared penalty on all",
    claim="prime-rl's default loss; its authors publish no comparison",
)
