"""M2PO: tokens are masked until the second moment of the log-ratio is small (arXiv 2510.01161, Algorithm 1).

Claim: with data 256 updates old, the mean of (log r)^2 over a batch is a better trust region than a clip per token:
masking the few worst ones keeps the informative rest (1.22 % of the tokens clipped become 0.06 %). tau = 0.04.
Paper (`m2po`): r is current policy over sampler; only tokens that PPO could clip (A > 0 and r > 1, A < 0 and r < 1) are
counted and masked, the largest first, while their mean exceeds tau; loss -M A r without any clip, averaged over all
tokens. AReaL (`m2po_areal`): r is old policy over sampler, all tokens count, at least one stays, and the clipped loss
follows. Both per optimizer batch. The ratio of the paper's loss has the sampler in it, so a correction weight is
ignored there.
Left out: the authors' released code, which is a third rule: it turns tau into two clip bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from harness.objective.loss import log_ratio
from methods.naive import LOW_BIT


def outliers(moment: Tensor, counted: Tensor, tau: float, at_least: int) -> Tensor:
    """The fewest largest entries without which the mean of the counted rest is at most tau, [B, T] bool.

    moment [B, T] float, counted [B, T] bool; `at_least` so many counted entries remain, whatever their mean.
    """
    found = torch.zeros_like(counted)
    ascending, order = moment[counted].double().sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    is_out = means > tau
    is_out[:at_least] = False
    found[counted] = torch.empty_like(is_out).scatter_(0, order, is_out)
    return found


@dataclass(frozen=True, kw_only=True)
class M2Mask(Part):
    """The second-moment mask, once per optimizer batch."""

    tau: float = 0.04
    """Largest mean of the squared log-ratio, nats squared."""
    policy: Literal["current", "old"] = "current"
    """Whose log-ratio to the sampler: the live policy, or the trainer before any update on this batch."""
    scope: Literal["trust_region", "all"] = "trust_region"
    """trust_region: only tokens that PPO could clip."""
    at_least: int = 0
    """Tokens of the scope that stay whatever their moment; AReaL: 1."""

    def __post_init__(self) -> None:
        if self.tau < 0 or self.at_least < 0:
            raise ValueError(f"{type(self).__name__}.tau, at_least: {self.tau}, {self.at_least} must be 0 or more")

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bypass modes have no policy before the update: in verl the sampler takes its place."""
        return ("decoupled",) if self.policy == "old" else ()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        d = (logp if self.policy == "current" else b.old_logp) - b.rollout_logp
        counted = b.mask & torch.isfinite(d)
        if self.scope == "trust_region":
            counted = counted & (d * b.adv > 0)
        return replace(c, keep=c.keep & ~outliers(d.square(), counted, self.tau, self.at_least))


@dataclass(frozen=True, kw_only=True)
class M2PO(M2Mask):
    """The mask, and the paper's loss without a clip."""

    owns_objective: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        return torch.where(c.keep, -b.adv * log_ratio(logp, b.rollout_logp).exp(), 0.0)


METHOD = Method(
    claim="data 256 updates old train like fresh data; clipped tokens fall from 1.22 % to 0.06 %",
    name="m2po",
    paper="arXiv 2510.01161",
    parts=(M2PO(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="token-mean",
    denom="original",
    summary="worst tokens masked until the mean squared log-ratio is 0.04",
)
AREAL = replace(
    METHOD,
    name="m2po_areal",
    paper="arXiv 2510.01161 as in AReaL",
    parts=(M2Mask(policy="old", scope="all", at_least=1),),
    agg=None,
    denom="kept",
    summary="m2po's mask on old policy over sampler, with PPO's clip",
)
