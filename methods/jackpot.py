"""Jackpot: tokens accepted with a probability that brings the sampler's distribution to the policy's.

Paper: arXiv 2602.06107; its text is in Infini-AI-Lab/jackpot.
Claim: no rule of equal acceptance comes closer to the policy than this one (theorems 3.3, 3.4). About 95 % of the
tokens are accepted and the KL falls tenfold, so that a 1.7B model samples for an 8B one for 300 steps.
Rule (eq. 3 to 5): of a token v with probability p(v) for the sampler and q(v) for the policy accept with probability
a(v) = min(1, q / (lam p)); later tokens stay. What is accepted is distributed as P = min(p, q / lam) / Z, where Z, the
sum over the vocabulary, is the acceptance rate, and q / P = Z max(lam, q / p) is the weight of an accepted token, cut
at a cap.
Here, with one model: q is the trainer's policy before any update, and PPO's ratio has the rest. There is one Z for the
batch, its mean of a, exact on average. knobs.Jackpot.source=full has that of every position, at lam = 1: 1 less the
total variation of p and q, which the trainer takes over whole distributions; the paper has the tokens of both top-20
sets, scaled to the batch's acceptance. The draw is a hash of the response: neither its place nor the micro-batch
matters.
Ours: lam (a figure suggests 1), the cap, denominators that count rejected tokens. Left out: the sampler's own training
by PPO and distillation (eq. 8), which needs two models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, Step, TokenBatch
from harness.foundation.seeds import generator
from harness.objective.loss import bounded
from methods.flashrl import log_rho
from methods.naive import LOW_BIT


def acceptance(log_ratio: Tensor, lam: float) -> Tensor:
    """min(1, q / (lam p)) of the sampled tokens, float of the shape of `log_ratio` = log q - log p, nats."""
    return bounded(log_ratio - log(lam)).clamp(max=0.0).exp()


def accepted_weight(log_ratio: Tensor, rate: Tensor, lam: float, cap: float) -> Tensor:
    """min(Z max(lam, q / p), cap), [B, T] float. `rate` [B, T] or []: Z. Constants."""
    return (rate * bounded(log_ratio).exp().clamp(min=lam)).clamp(max=cap)


def draws(b: TokenBatch, valid: Tensor) -> Tensor:
    """[B, T] uniform numbers in [0, 1), the same for equal responses of a step, whatever stands beside them."""
    numbers = torch.ones(valid.shape, dtype=torch.float64, device="cpu")
    for row, counts in enumerate(valid.cpu()):
        if bool(counts.any()):
            token_ids, logp = b.token_ids[row].cpu()[counts], b.rollout_logp[row].detach().cpu()[counts]
            content = (str(cast("list[float]", x.tolist())) for x in (token_ids, logp))  # pyright: ignore[reportUnknownMemberType]
            rng = generator("cpu", b.step.seed, "jackpot", b.step.index, *content)
            numbers[row, counts] = torch.rand(int(counts.sum()), generator=rng, dtype=torch.float64, device="cpu")
    return numbers.to(valid.device)


@dataclass(frozen=True, kw_only=True)
class Jackpot(Part):
    """Budgeted rejection of tokens, and the weight that what is accepted then needs."""

    sets_weight: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    lam: float = 1.0
    """Budget: a larger one rejects more and comes closer to the policy."""
    cap: float = 2.0
    """Largest weight."""
    source: Literal["sampled", "full"] = "sampled"
    """sampled: one Z, the batch's mean acceptance; full: Z of every position from whole distributions, at lam 1."""

    def __post_init__(self) -> None:
        if min(self.lam, self.cap) <= 0:
            raise ValueError(f"Jackpot.lam, cap: {self.lam}, {self.cap} (choose above 0)")
        if self.source == "full" and self.lam != 1:
            raise ValueError(f"Jackpot.lam: {self.lam} with source full (choose 1, or source sampled)")

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"rollout_tv"} if self.source == "full" else ())

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        valid, log_ratio = b.valid, log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        chance = acceptance(log_ratio, self.lam)
        if not bool(valid.any()):
            return c
        memory["acceptance"] = float(chance[valid].mean())
        rate = chance[valid].mean()
        if self.source == "full":
            rate = 1.0 - torch.where(valid, b.extras["rollout_tv"], 0.0)
            memory["expected_acceptance"] = float(rate[valid].mean())
        weight = accepted_weight(log_ratio, rate, self.lam, self.cap)
        keep = c.keep & (draws(b, valid) < chance)
        return replace(c, keep=keep, weight=torch.where(valid, weight, 1.0).to(c.weight))


METHOD = Method(
    name="jackpot",
    paper="arXiv 2602.06107",
    parts=(Jackpot(),),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    denom="original",
    summary="tokens are accepted with probability min(1, pi_old / pi_rollout), and weighed by what that leaves",
    claim="no rule of equal acceptance comes closer to the policy; a 1.7B model samples for an 8B one for 300 steps",
    reconstructed="the budget and the cap; one acceptance rate for the batch",
)
