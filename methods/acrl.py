"""ACRL: importance weights raised to a power that steers the discrepancy back to its initial size.

Paper: arXiv 2607.24062 (ICML 2026), known through two summaries that agree on the formula; no code.
Claim: w = rho^alpha with alpha = gamma sign(A) (1 - Y / X), where X is the mean |pi_old - pi_rollout| of the first
batch and Y that of a response now, keeps the gap near X. Above it, tokens that widen it are damped and tokens that
close it boosted; below it the opposite, on purpose. Biased by design: no alpha is plain importance sampling for both
signs. Paper: gamma 0.65 for 7B, 0.5 to 1.7 works, 2.1 and more fails.
Two notes have Y per response, one per batch. Ours: the bound on |log w|, X over four batches, the floor under X.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.flashrl import log_rho
from methods.naive import LOW_BIT

SMALLEST = 1e-6
"""Below this set point (a sampler in the trainer's own precision) Y / X says nothing: X is held at it."""


def probability_gap(b: TokenBatch) -> tuple[Tensor, Tensor]:
    """(|pi_old - pi_rollout| of the sampled tokens, 0 where invalid; validity), [B, T] float and bool."""
    valid = b.valid
    gap = (b.old_logp.exp() - b.rollout_logp.exp()).abs()
    return torch.where(valid, gap, 0.0), valid


def steering_weight(log_ratio: Tensor, adv: Tensor, y: Tensor, x: float, gamma: float, bound: float) -> Tensor:
    """rho^alpha, alpha = gamma sign(A) (1 - y / x), within [1 / bound, bound]; [B, T] float.

    log_ratio [B, T] = log rho nats; adv [B, T]; y [B, 1] or [] and x > 0: mean gaps in probability. Constants.
    """
    alpha = gamma * adv.sign() * (1.0 - y / x)
    return (alpha * log_ratio).clamp(-log(bound), log(bound)).exp()


@dataclass(frozen=True, kw_only=True)
class ACRL(Part):
    """Adaptive control of the discrepancy between sampler and trainer, through the weight."""

    sets_weight: ClassVar[bool] = True
    gamma: float = 0.65
    """Gain of the controller; 0 is no correction."""
    over: Literal["response", "batch"] = "response"
    """Tokens over which Y is averaged."""
    num_batches: int = 4
    """Batches that X is the mean of; until then their mean so far. The paper takes the first alone."""
    bound: float = 5.0
    """Weights stay within [1 / bound, bound]."""

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"ACRL.gamma: {self.gamma} is negative (choose 0 or more; the paper's is 0.65)")
        if self.num_batches < 1:
            raise ValueError(f"ACRL.num_batches: {self.num_batches} (choose 1 or more)")
        if self.bound < 1:
            raise ValueError(f"ACRL.bound: {self.bound} is below 1 (choose 1 or more)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        gap, valid = probability_gap(b)
        if not bool(valid.any()):
            return replace(c, weight=torch.ones_like(c.weight))
        batch_mean = gap.sum() / valid.sum()
        x = self._set_point(float(batch_mean), memory)
        y = batch_mean
        if self.over == "response":
            y = gap.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        adv = torch.where(valid, b.adv, 0.0)
        return replace(c, weight=steering_weight(log_ratio, adv, y, x, self.gamma, self.bound))

    def _set_point(self, gap: float, memory: Memory) -> float:
        """X; `memory` keeps it, the batches in it, and whether it is too small to mean anything."""
        count = memory.get("num_batches", 0.0)
        if count < self.num_batches:
            count += 1.0
            memory["set_point"] = memory.get("set_point", 0.0) + (gap - memory.get("set_point", 0.0)) / count
            memory["num_batches"] = count
        memory["gap"] = gap
        memory["is_set_point_tiny"] = float(memory["set_point"] < SMALLEST)
        return max(memory["set_point"], SMALLEST)


METHOD = Method(
    name="acrl",
    paper="arXiv 2607.24062",
    parts=(ACRL(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="weights rho^alpha that steer the probability gap back to its initial size",
    claim="truncated FP8 rollouts end level with BF16 on GSM8K (86.13, 85.90) where MIS fails",
    reconstructed="the bound on the weights, a set point from four batches and its floor",
)
