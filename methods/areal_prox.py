"""AReaL's proximal policy without a pass of its own: between sampler and current policy, by the version of each token.

Paper: arXiv 2505.24298 (the decoupled objective); the interpolation is in its code, inclusionAI/AReaL.
With v the version that an update makes and v_t the version that sampled a token, the proximal policy is version v - 1:

    log prox = log mu + a sg[log pi - log mu],   a = clip((v - 1 - v_t) / (v - v_t), 0, 1)
    loss = max(-A r, -A clip(r)) w,   r = pi / prox,   w = prox / mu, constant

A token of the newest weights has a = 0 and prox = mu, so that a synchronous run is PPO without a proximal policy, and
an old token comes near w = pi / mu, r = 1. Versions count steps, so all updates of a batch make version `step.index`
+ 1. Every ratio is that of a token to its own version (`algo.partial_rollouts`, `algo.staleness`). Log-ratios are
clamped to +-20. Left out: masks of large w, off by default there. The pass that this saves still runs, for the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Method, Part, Step, TokenBatch
from harness.objective.loss import clipped_surrogate, log_ratio
from methods.naive import LOW_BIT


def share(version: Tensor, now: int) -> Tensor:
    """a of tokens [B, T] int64 that version `version` sampled, where an update makes version `now`; float64."""
    age = (now - version).clamp(min=1)
    return (age - 1).double() / age.double()


def proximal(logp: Tensor, rollout_logp: Tensor, a: Tensor) -> Tensor:
    """Log-probs of the proximal policy, [B, T] nats, constant; all arguments [B, T]."""
    return rollout_logp + a.to(logp.dtype) * log_ratio(logp.detach(), rollout_logp)


def decoupled(logp: Tensor, prox: Tensor, rollout_logp: Tensor, adv: Tensor, c: Correction) -> Tensor:
    """The clipped loss against the proximal policy, times prox over mu; [B, T] with the gradient of `logp`."""
    weight = log_ratio(prox, rollout_logp).exp()
    return weight * clipped_surrogate(logp, prox, adv, c, dual_clip=None)


@dataclass(frozen=True, kw_only=True)
class InterpolatedProx(Part):
    """The decoupled objective with the interpolated proximal policy."""

    owns_objective: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("bypass_ppo",)
    """It stands in place of the trainer's old policy."""

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"version"})

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        assert b.version is not None
        prox = proximal(logp, b.rollout_logp, share(b.version, b.step.index + 1))
        return torch.where(c.keep, decoupled(logp, prox, b.rollout_logp, b.adv, c), 0.0)


METHOD = Method(
    name="areal_prox",
    paper="arXiv 2505.24298",
    parts=(InterpolatedProx(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="token-mean",
    mode="bypass_ppo",
    denom="original",
    summary="a proximal policy interpolated between sampler and current policy by the version of each token",
    claim="the proximal policy needs no forward pass of its own",
)
