"""TRM: a response is learnt from whole or not at all, by its largest token divergence (arXiv 2512.23075).

Claim: the error of the surrogate grows with the largest divergence of any token, so a bound for long responses needs a
test of the whole sequence: clips and token masks leak gradient out of the trust region. Keep response i if
max_t KL_t <= delta_max (0.05 stabilises) and, where delta_mean is set, mean_t KL_t <= delta_mean (0.001). Loss
-(1/N) sum_i keep_i A_i sum_t r_t with r = pi / pi_rollout, no clip, N counting the rejected responses too.
KL_t = KL(pi_rollout || pi) over the whole vocabulary. `full` takes it from the trainer, which computes it against the
policy before the batch's updates; `sampled` is the paper's fallback on log-probs of the sampled tokens, k2 for the
maximum and k3 for the mean, against the live policy. The ratio has the sampler in it, so a correction weight is
ignored. Left out: the length-neutral acceptance test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, Step, TokenBatch, later
from harness.objective.loss import log_ratio
from methods.flashrl import log_rho
from methods.mis import calibrated_bound, check_frac, divergence
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class TRM(Part):
    """Trust region masking, per update, with its own loss."""

    owns_objective: ClassVar[bool] = True
    source: Literal["full", "sampled"] = "full"
    """full: KL of whole distributions; sampled: estimates from the sampled tokens."""
    policy: Literal["current", "old"] = "current"
    """Policy that `sampled` compares with the sampler: the live one, or the trainer before any update on this batch.
    `full` is always old."""
    delta_max: float = 0.05
    """Largest divergence of any token, nats. The paper: 0.05 stabilises, 0.1 does not."""
    delta_mean: float | None = None
    """Largest mean divergence, nats per token; null does not test it. The paper: 0.001."""
    reject_frac: float | None = later(None)
    """Replace delta_max by the bound that rejects this share of the first update's responses (ours); None keeps it."""

    def __post_init__(self) -> None:
        check_frac(self, self.reject_frac)
        if min(self.delta_max, self.delta_mean or 0.0) < 0:
            raise ValueError(f"TRM.delta_max, delta_mean: {self.delta_max}, {self.delta_mean} must be 0 or more")

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bypass modes have no policy before the update: in verl the sampler takes its place."""
        return ("decoupled",) if self.source == "full" or self.policy == "old" else ()

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"rollout_kl"}) if self.source == "full" else frozenset()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        policy = logp if self.policy == "current" and self.source == "sampled" else b.old_logp
        valid = b.mask & torch.isfinite(policy - b.rollout_logp)
        d = log_rho(policy, b.rollout_logp, b.mask, "token")
        if self.source == "full":
            kl = torch.where(valid, b.extras["rollout_kl"], 0.0)
            largest, total = kl.amax(-1, keepdim=True), kl.sum(-1, keepdim=True)
            mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
        else:
            largest, mean = divergence(d, valid, "k2", "seq_max"), divergence(d, valid, "k3", "seq_mean")
        bound = self.delta_max
        if self.reject_frac is not None:
            bound = calibrated_bound(largest[valid.any(-1), 0], self.reject_frac, memory)
        keep = c.keep & (largest <= bound)
        return replace(c, keep=keep if self.delta_mean is None else keep & (mean <= self.delta_mean))

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        return torch.where(c.keep, -b.adv * log_ratio(logp, b.rollout_logp).exp(), 0.0)


METHOD = Method(
    claim="masking whole sequences keeps a trust region at any length and stabilises an 8B model",
    name="trm",
    paper="arXiv 2512.23075",
    parts=(TRM(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-sum",
    denom="original",
    summary="responses with any token's KL above 0.05 are dropped, no clip",
)
SAMPLED = replace(
    METHOD,
    name="trm_sampled",
    parts=(TRM(source="sampled"),),
    summary="trm with the divergence estimated from the sampled tokens",
)
