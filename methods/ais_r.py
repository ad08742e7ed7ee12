"""AIS-R: one coefficient per batch between no correction and truncated importance sampling. Our reconstruction.

Idea: adaptive importance sampling, arXiv 2605.13907: the coefficient comes from the effective sample size, the mean
|log rho| and the variation of the weights, because early mismatch explores and late mismatch destabilises. How the
three combine, every constant, and even the sign of the sample size's role are not public, so nothing measured here
speaks for that paper.
Rule (ours): w = 1 + lam (min(rho, C) - 1), lam = clip(trust (1 - exp(-div / div0)) / (1 + (cv / cv0)^2)), with the
effective sample size of the truncated weights in `trust` and the variation of the raw ones, else one says the other.
Left out: a linear combination of the three with signs of its own, as unfounded as this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import ClassVar, Literal

from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.flashrl import log_rho, truncated_weight
from methods.naive import LOW_BIT

LATE_ESS = 0.7
"""The sample size that the paper reports late in uncorrected training: full alarm."""


def diagnostics(log_ratio: Tensor, valid: Tensor, cap: float) -> dict[str, float]:
    """ess in (0, 1] of min(rho, cap), div = mean |log rho| nats, cv of rho (population), over the valid tokens.

    log_ratio [B, T] = log rho nats, valid [B, T] bool. Nothing valid: ess 1, div 0, cv 0.
    """
    d = log_ratio[valid].double()
    if not d.numel():
        return {"ess": 1.0, "div": 0.0, "cv": 0.0}
    truncated, raw = truncated_weight(d, cap), truncated_weight(d, float("inf"))
    ess = truncated.sum().square() / (d.numel() * truncated.square().sum())
    cv = raw.std(correction=0) / raw.mean()
    return {"ess": float(ess), "div": float(d.abs().mean()), "cv": float(cv)}


@dataclass(frozen=True, kw_only=True)
class AISR(Part):
    """Interpolated truncated importance sampling."""

    sets_weight: ClassVar[bool] = True
    cap: float = 2.0
    """The truncation C."""
    ess_role: Literal["trust", "alarm"] = "trust"
    """trust: correct less when the effective sample size falls; alarm: correct harder."""
    div0: float = 0.01
    """Mean |log rho| (nats) at which the divergence factor is 1 - 1/e."""
    cv0: float = 1.0
    """Variation of the raw weights that halves lam."""
    lam_min: float = 0.0
    lam_max: float = 1.0
    beta: float = 0.0
    """Share of the previous lam in a running mean; 0 has none."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam_min <= self.lam_max <= 1:
            raise ValueError(
                f"AISR.lam_min, lam_max: {self.lam_min}, {self.lam_max} (choose 0 <= lam_min <= lam_max <= 1)"
            )
        for name in ("cap", "div0", "cv0"):
            if getattr(self, name) <= 0:
                raise ValueError(f"AISR.{name}: {getattr(self, name)} is not positive")
        if not 0 <= self.beta < 1:
            raise ValueError(f"AISR.beta: {self.beta} (choose 0 <= beta < 1)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        valid = b.valid
        found = diagnostics(log_ratio, valid, self.cap)
        lam = self.coefficient(**found)
        lam = self.beta * memory.get("lam", lam) + (1.0 - self.beta) * lam
        memory.update(found, lam=lam)
        return replace(c, weight=1.0 + lam * (truncated_weight(log_ratio, self.cap) - 1.0))

    def coefficient(self, *, ess: float, div: float, cv: float) -> float:
        """lam of one batch, within [lam_min, lam_max]."""
        trust = ess if self.ess_role == "trust" else min(1.0, (1.0 - ess) / (1.0 - LATE_ESS))
        lam = trust * (1.0 - exp(-div / self.div0)) / (1.0 + (cv / self.cv0) ** 2)
        return min(max(lam, self.lam_min), self.lam_max)


METHOD = Method(
    name="ais_r",
    paper="arXiv 2605.13907",
    parts=(AISR(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="one coefficient per batch between no correction and token TIS",
    claim="the paper's own rule, which this is not: FP8 rollouts match BF16 on 11 of 12 benchmarks",
    reconstructed="the whole rule; only the idea and its three diagnostics are the paper's",
)
