"""DC-GRPO: the gap of probabilities between trainer and sampler is a cost, held at a level by an adaptive multiplier.

Paper: arXiv 2606.08779 (DCMDP), known through notes and a fork of verl by others.
Claim: as a constrained decision process, with cost d_t = |pi_old - pi_rollout| of the sampled token and the constraint
mean d <= c, training is better than GRPO with BF16 and with FP8 rollouts.
Rule of the fork: A_t <- A_t - lam d_t with d detached, and once a step lam <- lam + eta (mean d - c), within bounds;
the step uses the multiplier that it begins with. Constants: lam 0.1 and c 0.0037 for 8B (0.05 and 0.005 for 30B-A3B),
eta 1.
Ours: lam stays between 0 and 1. Not known: whether the paper shifts rewards before they are compared within a group.
A weight cannot do this: it leaves tokens of advantage 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.acrl import probability_gap
from methods.naive import LOW_BIT


def next_multiplier(
    lam: float, cost: float, level: float, eta: float, low: float = 0.0, high: float = float("inf")
) -> float:
    """lam + eta (cost - level), within [low, high]."""
    return min(max(lam + eta * (cost - level), low), high)


@dataclass(frozen=True, kw_only=True)
class GapCost(Part):
    """A shift of every token's advantage by its gap in probability, times the multiplier."""

    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    lam: float = 0.1
    """The multiplier at the first step."""
    level: float = 0.0037
    """Mean gap in probability at which the multiplier rests."""
    eta: float = 1.0
    """Rate of the multiplier."""
    lam_min: float = 0.0
    lam_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lam_min <= self.lam <= self.lam_max:
            raise ValueError(
                f"GapCost.lam_min, lam, lam_max: {self.lam_min}, {self.lam}, {self.lam_max} must rise from 0 or more"
            )
        if min(self.level, self.eta) < 0:
            raise ValueError(f"GapCost.level, eta: {self.level}, {self.eta} (choose 0 or more)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        gap, valid = probability_gap(b)
        lam = memory.get("lam", self.lam)
        if bool(valid.any()):
            memory["gap"] = float(gap.sum() / valid.sum())
            memory["lam"] = next_multiplier(lam, memory["gap"], self.level, self.eta, self.lam_min, self.lam_max)
        return c.shifted(-lam * gap.to(c.weight))


METHOD = Method(
    name="dc_grpo",
    paper="arXiv 2606.08779",
    parts=(GapCost(),),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    summary="the gap in probability is a cost in the advantage, with a multiplier that holds it at a level",
    claim="a cost on the gap with an adaptive multiplier beats GRPO with BF16 and FP8 rollouts",
    reconstructed="the bounds of the multiplier; the shift is of advantages, as a fork by others has it",
)
