"""IcePop: a token whose two policies disagree too much gets weight 0 (Ring-1T, arXiv 2510.18855).

Claim: dropping the tokens outside [alpha, beta] instead of truncating their weight keeps MoE training stable, about 6 %
better than TIS. Paper: alpha 0.5, beta 5, no KL term, seq-mean-token-mean.
In-band tokens keep the untruncated ratio as weight (paper and verl's "0.5_5.0"; one port's docstring says unweighted).
The mask and every denominator stay as they are. Left out: nothing; the aggregation is left to the algorithm.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch, later
from methods.flashrl import log_rho, truncated_weight
from methods.mis import calibrated_bound, check_frac
from methods.naive import LOW_BIT


def popped_weight(log_ratio: Tensor, alpha: float, beta: float) -> Tensor:
    """exp(log_ratio) inside [alpha, beta], bounds included, else 0. [B, T] float nats -> [B, T]."""
    rho = truncated_weight(log_ratio, float("inf"))
    return torch.where((rho >= alpha) & (rho <= beta), rho, 0.0)


@dataclass(frozen=True, kw_only=True)
class IcePop(Part):
    """Two-sided token mask through the weight."""

    sets_weight: ClassVar[bool] = True
    alpha: float = 0.5
    beta: float = 5.0
    reject_frac: float | None = later(None)
    """Replace the band by one around 1, symmetric in log, that rejects this fraction of the first batch's tokens
    (ours); None keeps it."""

    def __post_init__(self) -> None:
        check_frac(self, self.reject_frac)
        if not 0 <= self.alpha < self.beta:
            raise ValueError(f"IcePop.alpha, beta: {self.alpha}, {self.beta} is not a band (choose 0 <= alpha < beta)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        if self.reject_frac is None:
            return replace(c, weight=popped_weight(log_ratio, self.alpha, self.beta))
        bound = calibrated_bound(log_ratio[b.valid].abs(), self.reject_frac, memory)
        weight = popped_weight(log_ratio, 0.0, float("inf"))
        return replace(c, weight=torch.where(log_ratio.abs() <= bound, weight, 0.0))


METHOD = Method(
    name="icepop",
    paper="arXiv 2510.18855",
    parts=(IcePop(),),
    precisions=(*LOW_BIT, "bf16"),
    claim="14 points more on AIME25 with a 16.8B MoE model, 6 % above TIS",
    summary="tokens outside the ratio band [0.5, 5] get weight 0",
)
