"""DPPO: a trust region on the divergence of probabilities in place of PPO's clip on their ratio.

Paper: arXiv 2602.04879; code sail-sg/Stable-RL (the authors'), verl `dppo_tv` and `dppo_kl`, prime-rl's default loss.
Claim: a ratio says little about a divergence. A rare token may change fifty-fold without moving the policy, and PPO
clips it; a common one that loses a fifth of its probability moves it much, and PPO lets it. With the sampler as anchor
one mask bounds mismatch and staleness.
Rule: keep a token unless the update pushes it further out: for A > 0, p - p0 <= delta_high; else p - p0 >= -delta_low
(TV); the binary KL(p0 || p) bounded on the same side (KL). Loss -A sg(min(p / p0, cap)) log p. prime-rl: -A p / p0,
differentiable, plus kappa log(p / p0)^2 on every token, masked or not; its thresholds are 0.2.
The ratio to the sampler has the whole correction in it, so a correction weight is then ignored; the ratio to the old
policy (verl outside its bypass mode) is multiplied by it. Left out: the top-K divergences, which need whole
distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch, later
from harness.objective.loss import log_ratio
from methods.mis import calibrated_bound, check_frac
from methods.naive import LOW_BIT

Anchor = Literal["rollout", "old"]


def anchor_logp(b: TokenBatch, anchor: Anchor) -> Tensor:
    """[B, T] nats: the sampler's log-probs, or the trainer's before any update on this batch."""
    return b.rollout_logp if anchor == "rollout" else b.old_logp


def binary_kl(logp: Tensor, anchor: Tensor) -> Tensor:
    """KL(p0 || p) of "this token or any other", [B, T] nats, from two log-probs [B, T] (verl's 1e-8 in both tails)."""
    p, p0 = logp.exp(), anchor.exp()
    return p0 * (anchor - logp) + (1.0 - p0) * ((1.0 - p0 + 1e-8) / (1.0 - p + 1e-8)).log()


def trusted(
    logp: Tensor, anchor: Tensor, adv: Tensor, divergence: Literal["tv", "kl"], low: float, high: float
) -> Tensor:
    """True where a token stays in the trust region or moves back to it, [B, T] bool; False for a NaN.

    logp, anchor [B, T] nats, adv [B, T], all constants; `high` bounds tokens with adv > 0, `low` the others.
    """
    shift = logp.exp() - anchor.exp()
    if divergence == "tv":
        up, down = shift <= high, shift >= -low
    else:
        kl = binary_kl(logp, anchor)
        up, down = (kl <= high) | (shift <= 0), (kl <= low) | (shift >= 0)
    return torch.where(adv > 0, up, down)


@dataclass(frozen=True, kw_only=True)
class DPPO(Part):
    """The divergence mask, per update, and the policy gradient that it masks."""

    owns_objective: ClassVar[bool] = True
    divergence: Literal["tv", "kl"] = "tv"
    """tv: difference of the sampled token's probability; kl: KL of that token against the rest, nats."""
    delta_low: float = 0.15
    """Bound for tokens with A <= 0; verl's example: 0.15 for tv, 0.05 for kl."""
    delta_high: float = 0.15
    """Bound for tokens with A > 0."""
    mask_anchor: Anchor = "rollout"
    """p0 of the mask; "old" is the authors' `recompute` ablation, which grows the mismatch until collapse."""
    ratio_anchor: Anchor = "rollout"
    """p0 of the ratio; "old" leaves the sampler to a correction weight."""
    cap: float | None = 20.0
    """Largest ratio; None does not truncate."""
    is_differentiable: bool = False
    """-A p / p0 in place of -A sg(p / p0) log p: another value, the same gradient below the cap."""
    kappa: float = 0.0
    """Coefficient of log(p / p0)^2 over all tokens; prime-rl: 0.001."""
    reject_frac: float | None = later(None)
    """Replace both bounds by one that this fraction of the first update's tokens exceeds, whatever the side (ours; the
    mask spares those that move back, so it rejects about half of them); None keeps them."""

    def __post_init__(self) -> None:
        check_frac(self, self.reject_frac)
        if min(self.delta_low, self.delta_high) <= 0:
            raise ValueError(f"DPPO.delta_low, delta_high: {self.delta_low}, {self.delta_high} must be above 0")
        if self.kappa < 0:
            raise ValueError(f"DPPO.kappa: {self.kappa} is negative (choose 0 or more)")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"DPPO.cap: {self.cap} cuts the ratio of an unchanged policy (choose 1 or more, or null)")

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bypass modes have no policy before the update for the mask: in verl the sampler takes its place. Weights
        of bypass_pg have the current policy in them, as a ratio to the old one has."""
        if self.mask_anchor == "old":
            return ("decoupled",)
        return ("decoupled", "bypass_ppo") if self.ratio_anchor == "old" else ()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        anchor = anchor_logp(b, self.mask_anchor)
        low, high = self.delta_low, self.delta_high
        if self.reject_frac is not None:
            size = binary_kl(logp, anchor) if self.divergence == "kl" else (logp.exp() - anchor.exp()).abs()
            low = high = calibrated_bound(size[b.valid], self.reject_frac, memory)
        return replace(c, keep=c.keep & trusted(logp, anchor, b.adv, self.divergence, low, high))

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        anchor = anchor_logp(b, self.ratio_anchor)
        ratio = log_ratio(logp, anchor).exp()
        ratio = ratio if self.cap is None else ratio.clamp(max=self.cap)
        gain = ratio if self.is_differentiable else ratio.detach() * logp
        weight = c.weight if self.ratio_anchor == "old" else 1.0
        loss = torch.where(c.keep, -b.adv * gain * weight, 0.0)
        return loss + self.kappa * (logp - anchor).square() if self.kappa else loss


TV = Method(
    claim="stable on a 30B MoE model without routing replay, above GRPO on AIME24",
    name="dppo_tv",
    paper="arXiv 2602.04879",
    parts=(DPPO(),),
    precisions=(*LOW_BIT, "bf16"),
    denom="original",
    summary="tokens whose probability moved by more than 0.15 get no gradient",
)
KL = replace(
    TV,
    name="dppo_kl",
    parts=(DPPO(divergence="kl", delta_low=0.05, delta_high=0.05),),
    summary="tokens whose binary KL exceeds 0.05 get no gradient",
)
PRIME_RL = replace(
    TV,
    name="dppo_prime_rl",
    paper="arXiv 2602.04879 as in prime-rl",
    parts=(DPPO(delta_low=0.2, delta_high=0.2, cap=None, is_differentiable=True, kappa=1e-3),),
    agg="token-mean",
    summary="dppo_tv at 0.2 with a differentiable ratio and a squared log-ratio penalty",
)
