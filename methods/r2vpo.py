"""R2VPO: a bound on the variance of the policy ratio in place of PPO's clip.

Paper: arXiv 2605.26784 (OpenReview NT4Cz09S4w; first version 2601.03320), known from its abstract and introduction.
Claim: maximise E[r A] subject to Var(r) <= delta, primal and dual. The variance is a local proxy of the trust region
that cuts no gradient, which allows to reuse old data: up to 17 % better on average, with about half the rollouts.
Rule, ours beyond that: J = mean[r A - lam ((r - 1)^2 - delta)] without a clip, and with every update
lam <- max(0, lam + eta (mean (r - 1)^2 - delta)), where the update has the lam from before. E[r] = 1 under the old
policy, so the mean of (r - 1)^2 is the variance. The penalty is a shift of the advantage by -2 lam (r - 1), which
has the same gradient, r (A - 2 lam (r - 1)), and another value.
Not known: delta, the dual step, the first lam. Left out: the buffer of old data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from harness.objective.loss import log_ratio
from methods.dc_grpo import next_multiplier
from methods.dppo import Anchor, anchor_logp
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class R2VPO(Part):
    """The unclipped ratio with a penalty on its variance, whose multiplier holds it at a level."""

    owns_objective: ClassVar[bool] = True
    lam: float = 1.0
    """The multiplier at the first update; 0 with eta 0 is PPO without a clip."""
    delta: float = 0.01
    """Variance of the ratio at which the multiplier rests."""
    eta: float = 1.0
    """Rate of the multiplier."""
    anchor: Anchor = "old"
    """Policy below the ratio; "rollout" bounds mismatch and staleness in one, and a correction weight is ignored."""

    def __post_init__(self) -> None:
        for name in ("lam", "delta", "eta"):
            if getattr(self, name) < 0:
                raise ValueError(f"R2VPO.{name}: {getattr(self, name)} (choose 0 or more)")

    @property
    def needs_updates(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The old policy is the current one until an update; the sampler differs by its format."""
        return 2 if self.anchor == "old" else 1

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bypass modes have no policy before the update, so a ratio to it is none."""
        return ("decoupled",) if self.anchor == "old" else ()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        valid = b.valid
        lam, excess = memory.get("lam", self.lam), log_ratio(logp, anchor_logp(b, self.anchor)).exp() - 1.0
        excess = torch.where(valid, excess, 0.0)
        if bool(valid.any()):
            memory["variance"] = float(excess.square().sum() / valid.sum())
            memory["lam"] = next_multiplier(lam, memory["variance"], self.delta, self.eta)
        return c.shifted(-2.0 * lam * excess)

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        ratio = log_ratio(logp, anchor_logp(b, self.anchor)).exp()
        weight = c.weight if self.anchor == "old" else 1.0
        return torch.where(c.keep, -b.adv * ratio * weight, 0.0)


METHOD = Method(
    name="r2vpo",
    paper="arXiv 2605.26784",
    parts=(R2VPO(),),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    summary="the variance of the policy ratio is held at a level by an adaptive penalty, without a clip",
    claim="bounding the variance of the ratio beats clipping by up to 17 % with about half the rollouts",
    reconstructed="the rule beyond the constrained objective: the dual step, delta and the first multiplier",
)
