"""TBPO: the response as one action, with a trust band on both sides of a negative advantage.

Paper: QaRL, arXiv 2604.07853 (OpenReview oi0A6j428b), which adds a trainer forward in the sampler's grid
(`methods.qarl`); no code. The widths and the cap come from notes on the paper.
Claim: degenerate low-bit rollouts hold clusters of very improbable tokens. PPO leaves the ratio of a negative advantage
without an upper bound, so they dominate the gradient; a sequence ratio clipped on both sides does not let them.

    s = exp(mean_t (logp - old_logp)),  w = min(exp(mean_t log rho), C)
    A >= 0:  J = w min(s, 1 + eps_high) A        A < 0:  J = w s A where 1 - eps_low <= s <= 1 + delta_n, else 0

Loss: the mean of -J over responses; the part alone under algo.agg=token-mean weights them by length. A fork of the code
clips s for A < 0 instead of dropping it: another value, the same gradient. Only decoupled: elsewhere the weight would
hold s a second time. Left out: Muon, the authors' optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from harness.objective.loss import GSPO_LOG_RATIO_MAX, mean_log_ratio
from methods.flashrl import log_rho, truncated_weight
from methods.naive import LOW_BIT


def sequence_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """s = exp(mean over the mask of logp - old_logp), [B, 1]; its log is at most 10, as GSPO's.

    logp [B, T] nats with gradient, old_logp constant, mask [B, T] bool. A row without tokens has s = 1.
    """
    return mean_log_ratio(logp, old_logp, mask).clamp(max=GSPO_LOG_RATIO_MAX).exp()


def banded(s: Tensor, adv: Tensor, low: float, high: float, negative_high: float) -> Tensor:
    """J / w: min(s, high) A for A >= 0; for A < 0, s A inside [low, negative_high] and exactly 0 outside. [B, T].

    s [B, 1] with gradient; adv [B, T] constant.
    """
    inside = (s >= low) & (s <= negative_high)
    return torch.where(adv >= 0, s.clamp(max=high) * adv, torch.where(inside, s * adv, 0.0))


@dataclass(frozen=True, kw_only=True)
class TBPO(Part):
    """The banded sequence objective in place of the clipped surrogate, with a capped geometric mismatch weight."""

    sets_weight: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    eps_low: float = 3e-4
    """Width below 1 for negative advantages (notes on the paper); 0.2 with eps_high 0.28 is the tokens' scale."""
    eps_high: float = 4e-4
    """Width above 1 for positive advantages (notes on the paper)."""
    delta_n: float | None = 7e-4
    """Width above 1 for negative advantages (notes on the paper); null takes eps_high."""
    cap: float = 2.0
    """C, the largest weight (notes on the paper, and a public fork)."""
    lo: float | None = None
    """Drop responses whose geometric mismatch ratio is below this."""
    hi: float | None = None
    """... or above this."""

    def __post_init__(self) -> None:
        for name in ("eps_low", "eps_high", "delta_n"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"TBPO.{name}: {getattr(self, name)} is negative")
        if self.cap <= 0:
            raise ValueError(f"TBPO.cap: {self.cap} is not a positive weight")
        if (self.lo or 0.0) >= (float("inf") if self.hi is None else self.hi):
            raise ValueError(f"TBPO.lo, hi: {self.lo}, {self.hi} is not a band (choose lo < hi)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "geometric")
        rho, keep = truncated_weight(log_ratio, float("inf")), c.keep
        if self.lo is not None:
            keep = keep & (rho >= self.lo)
        if self.hi is not None:
            keep = keep & (rho <= self.hi)
        return replace(c, weight=rho.clamp(max=self.cap), keep=keep)

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor | None:
        delta = self.eps_high if self.delta_n is None else self.delta_n
        s = sequence_ratio(logp, b.old_logp, b.mask)
        return -banded(s, b.adv, 1.0 - self.eps_low, 1.0 + self.eps_high, 1.0 + delta)


METHOD = Method(
    name="tbpo",
    paper="arXiv 2604.07853",
    parts=(TBPO(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-mean",
    mode="decoupled",
    summary="sequence ratios, with a band on both sides of negative advantages",
    claim="with QaRL's forward, 4-bit rollouts average 48.9 where GRPO has 43.9 and BF16 51.8",
    reconstructed="the widths of the band and the cap come from notes; without QaRL's aligned forward",
)
