"""Soft TIS: a smooth cap on the importance weight, as an example of a method outside the project.

Claim: none; it is an example. Truncated importance sampling weights a token by min(rho, C), rho = pi_old / pi_rollout,
which is flat beyond C. Here the weight approaches C smoothly and stays 1 where the two policies agree:

    w = C rho / (C - 1 + rho)        w(1) = 1,  w -> C as rho -> inf,  increasing in rho

Left out: anything a real method would need, such as evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.flashrl import log_rho, truncated_weight
from methods.naive import LOW_BIT


def soft_weight(rho: Tensor, cap: float) -> Tensor:
    """C rho / (C - 1 + rho) for rho [B, T] >= 0 and C > 1 -> [B, T], in [0, C)."""
    return cap * rho / (cap - 1.0 + rho)


@dataclass(frozen=True, kw_only=True)
class SoftTIS(Part):
    """A smoothly capped importance weight per token."""

    sets_weight: ClassVar[bool] = True
    cap: float = 2.0
    """What the weight approaches for large ratios; must exceed 1."""

    def __post_init__(self) -> None:
        if self.cap <= 1.0:
            raise ValueError(f"SoftTIS.cap: {self.cap} does not exceed 1")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        rho = truncated_weight(log_rho(b.old_logp, b.rollout_logp, b.mask, "token"), float("inf"))
        weight = soft_weight(rho, self.cap)
        memory["weight_max"] = float(weight.max())
        return replace(c, weight=weight)


METHOD = Method(
    name="soft_tis",
    parts=(SoftTIS(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="importance weights with a smooth cap",
)
