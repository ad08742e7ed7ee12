"""KPop: tokens are masked by the divergence of their probability, in both directions, in place of the ratio.

Source: Ant group, article on Ring-2.6-1T (May 2026), through notes; code AReaL (pull request 1405).
Claim: IcePop's band of ratios masks fewer tokens while the gap still grows, because a ratio says little about a token
that is frequent; a two-sided KL of "this token or any other" masks by probability mass.

    D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q));   keep where D(p || q) <= phi and D(q || p) <= phi

p is the trainer's probability, q the sampler's. Kept tokens carry the untruncated old over rollout ratio, and
denominators count the kept tokens, as in AReaL. prime-rl takes the current policy for p (`policy=current`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.flashrl import log_rho, truncated_weight
from methods.naive import LOW_BIT

CERTAIN = -1e-6
"""Largest log-prob: beyond it 1 - p is below float32's resolution."""


def two_sided_kl(logp: Tensor, other: Tensor) -> Tensor:
    """max(D(p || q), D(q || p)) of the sampled token against all others, [B, T] nats; logp, other [B, T] nats."""
    logp, other = logp.clamp(max=CERTAIN), other.clamp(max=CERTAIN)
    p, q = logp.exp(), other.exp()
    on, off = logp - other, torch.log1p(-p) - torch.log1p(-q)
    return torch.maximum(p * on + (1.0 - p) * off, -q * on - (1.0 - q) * off)


@dataclass(frozen=True, kw_only=True)
class KPop(Part):
    """The mask, and the untruncated ratio as the weight of the kept tokens."""

    sets_weight: ClassVar[bool] = True
    phi: float = 0.1
    """Largest divergence of a kept token, nats, in either direction."""
    policy: Literal["old", "current"] = "old"
    """Whose probability p is: the trainer's before any update on this batch (AReaL), or the live one (prime-rl)."""

    def __post_init__(self) -> None:
        if self.phi <= 0:
            raise ValueError(f"KPop.phi: {self.phi} would drop every token that moved (choose above 0)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        c = replace(c, weight=truncated_weight(log_ratio, float("inf")))
        return self._masked(c, b.old_logp, b) if self.policy == "old" else c

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        return self._masked(c, logp, b) if self.policy == "current" else c

    def _masked(self, c: Correction, logp: Tensor, b: TokenBatch) -> Correction:
        return replace(c, keep=c.keep & (two_sided_kl(logp, b.rollout_logp) <= self.phi))


METHOD = Method(
    name="kpop",
    paper="Ant group, Ring-2.6-1T (2026)",
    parts=(KPop(),),
    precisions=(*LOW_BIT, "bf16"),
    denom="kept",
    summary="tokens whose binary KL to the sampler exceeds 0.1 in either direction are dropped",
    claim="masks by probability mass where IcePop's ratio band masks fewer tokens as the gap grows",
    reconstructed="whether p is the old or the current policy, and what the divisor counts; implementations differ",
)
