"""Masked importance sampling and rejection by divergence: what is too far off is dropped, not truncated.

Papers: "When Speed Kills Stability" (Liu, Li et al., blog, 2025) for MIS and geometric rejection; arXiv 2512.23075 for
the statistics; code verl rollout_corr_helper.py, TRL (default: sequence, cap 3), slime train_infer_mismatch_helper.
Claim: sequence-level masking is unbiased where token weights are not, and outlives them when the mismatch grows.
Bounds are stated on rho = pi_old / pi_rollout. verl's k1 options act on its inverse: `is_inverse` reproduces that.
Rejected tokens leave the numerator; whether denominators count them is the algorithm's `denom`.
The published bounds of the geometric mean are for BF16 and reject nearly every low-bit rollout: `reject_frac`
calibrates them once, on the first batch (ours). IcePop, DPPO and TRM have it too, so that masks can be compared at
equal shares of rejected tokens or responses. Left out: full-vocabulary divergences (trust region masking).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log
from typing import Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch, later
from harness.objective.loss import bounded
from methods.flashrl import TIS, Level, log_rho, truncated_weight
from methods.naive import LOW_BIT

Stat = Literal["k1", "k2", "k3"]
Over = Literal["token", "seq_sum", "seq_mean", "seq_max"]


def divergence(d: Tensor, mask: Tensor, stat: Stat, over: Over) -> Tensor:
    """k1 = d, k2 = d^2 / 2 or k3 = exp(d) - 1 - d, per token or over the sequence. d [B, T] = log rho -> [B, T] nats.

    d is clamped to +-20 and must be 0 outside the mask [B, T] bool. verl's k1 is the negative of this one.
    """
    d = bounded(d)
    value = d if stat == "k1" else 0.5 * d.square() if stat == "k2" else torch.expm1(d) - d
    if over == "token":
        return value
    if over == "seq_max":
        return value.amax(-1, keepdim=True).expand_as(d)
    count = mask.sum(-1, keepdim=True).clamp(min=1) if over == "seq_mean" else 1
    return (value.sum(-1, keepdim=True) / count).expand_as(d)


MOST_SIZES = 2**24
"""Values of which torch takes a quantile, at most."""


def calibrated_bound(size: Tensor, frac: float, memory: Memory) -> float:
    """The bound that rejects the share `frac` of the first `size` [N] that it sees, kept in `memory`; inf while N is 0.
    Beyond `MOST_SIZES` an even sample stands for all."""
    if "bound" not in memory and size.numel():
        memory["bound"] = float(size[:: -(-size.numel() // MOST_SIZES)].quantile(1.0 - frac))
    return memory.get("bound", inf)


def check_frac(part: Part, frac: float | None) -> None:
    """Raises ValueError where a share to reject is not one."""
    if frac is not None and not 0 <= frac < 1:
        raise ValueError(f"{type(part).__name__}.reject_frac: {frac} (choose null, or 0 up to below 1)")


@dataclass(frozen=True, kw_only=True)
class MIS(Part):
    """Keep lo <= rho <= hi at a level; kept tokens carry the untruncated ratio of `weight` (none: another part's)."""

    level: Level = "sequence"
    """token; sequence: product of the ratios; geometric: their geometric mean, independent of the length."""
    lo: float | None = None
    hi: float = 3.0
    weight: Literal["token", "sequence", "geometric", "none"] = "sequence"
    veto: float | None = None
    """Reject a sequence with any token ratio below this; slime and miles use 1e-4."""
    reject_frac: float | None = later(None)
    """Replace lo and hi by a band around 1, symmetric in log, that rejects this fraction of the first batch."""

    def __post_init__(self) -> None:
        check_frac(self, self.reject_frac)
        if not 0 <= (self.lo or 0.0) < self.hi:
            raise ValueError(f"MIS.lo, hi: {self.lo}, {self.hi} is not a band (choose 0 <= lo < hi, or null for lo)")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(f"MIS.veto: {self.veto} (choose above 0 and below 1, or null)")

    @property
    def sets_weight(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weight != "none"

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_level = log_rho(b.old_logp, b.rollout_logp, b.mask, self.level)
        if self.reject_frac is not None:
            size = log_level.abs()
            sample = size[b.valid] if self.level == "token" else size[b.valid.any(-1), 0]
            keep = c.keep & (size <= calibrated_bound(sample, self.reject_frac, memory))
        else:
            rho = truncated_weight(log_level, inf)
            keep = c.keep & (rho >= (self.lo or 0.0)) & (rho <= self.hi)
        if self.veto is not None:
            smallest = log_rho(b.old_logp, b.rollout_logp, b.mask, "token").amin(-1, keepdim=True)
            keep = keep & (smallest.exp() >= self.veto)
        if self.weight == "none":
            return replace(c, keep=keep)
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, self.weight)
        return replace(c, keep=keep, weight=truncated_weight(log_ratio, inf))


@dataclass(frozen=True, kw_only=True)
class Reject(Part):
    """Keep tokens or sequences whose divergence is inside the bounds. Weights are another part's business."""

    stat: Stat = "k3"
    over: Over = "seq_mean"
    lo: float | None = None
    """k1 only: lower bound on rho (of the product or geometric mean); k2 and k3 have none."""
    hi: float = 0.01
    """k1: upper bound on rho; k2 and k3: upper bound in nats."""
    is_inverse: bool = False
    """k1 bounds act on 1 / rho, as in verl."""
    reject_frac: float | None = None
    """Replace the bounds by those that reject this fraction of the first batch; None keeps them."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.stat == "k1" and (self.lo is None or not 0 < self.lo < self.hi or self.over == "seq_max"):
            raise ValueError(f"{name}.lo, hi: k1 over {self.over} needs 0 < lo < hi and token, seq_sum or seq_mean")
        if self.stat != "k1" and self.lo is not None:
            raise ValueError(f"{name}.lo: {self.lo} means nothing for {self.stat} (choose null)")
        if self.hi < 0:
            raise ValueError(f"{name}.hi: {self.hi} would reject everything (choose 0 or more)")
        if self.stat != "k1" and self.is_inverse:
            raise ValueError(f"{name}.is_inverse: true means nothing for {self.stat} (choose false)")
        check_frac(self, self.reject_frac)

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        valid = b.valid
        value = divergence(log_rho(b.old_logp, b.rollout_logp, b.mask, "token"), valid, self.stat, self.over)
        low, high = -inf, self.hi
        if self.stat == "k1":
            assert self.lo is not None
            low, high = (-log(self.hi), -log(self.lo)) if self.is_inverse else (log(self.lo), log(self.hi))
        if self.reject_frac is not None:
            size = value.abs()
            sample = size[valid] if self.over == "token" else size[valid.any(-1), 0]
            high = calibrated_bound(sample, self.reject_frac, memory)
            low = -high
        return replace(c, keep=c.keep & (value >= low) & (value <= high))


@dataclass(frozen=True, kw_only=True)
class GeoRS(Reject):
    """Geometric mean of the ratios; verl's bounds. NeMo-RL takes 0.999 to 1.002, SkyRL 0.99 to 1.01."""

    stat: Stat = "k1"
    lo: float | None = 0.999
    hi: float = 1.001


@dataclass(frozen=True, kw_only=True)
class K3RS(Reject):
    """Mean k3 of the response; verl's preset."""


PAPER = "blog, When Speed Kills Stability (2025)"
CLAIM = "sequence-level masks outlive token weights as the mismatch grows"
PRECISIONS = (*LOW_BIT, "bf16")
METHOD = Method(
    name="mis", paper=PAPER, parts=(MIS(),), precisions=PRECISIONS, claim=CLAIM,
    summary="sequence MIS, ratios above 3 are dropped",
)  # fmt: skip
GEO_RS = replace(METHOD, name="geo_rs", parts=(GeoRS(),), summary="rejection by the geometric mean ratio")
GEO_RS_TIS = replace(GEO_RS, name="geo_rs_tis", parts=(GeoRS(), TIS()), summary="geo_rs with token TIS")
K3_RS = replace(GEO_RS, name="k3_rs", parts=(K3RS(),), summary="rejection by the mean k3 of a response")
K3_RS_TIS = replace(
    K3_RS,
    name="k3_rs_tis",
    paper="arXiv 2605.14220",
    parts=(K3RS(hi=0.001), TIS()),
    summary="k3_rs at 0.001 with token TIS",
    claim="truncated token weights and rejection by the mean divergence mitigate the mismatch of BF16 engines",
    reconstructed="which divergence the paper's threshold of 0.001 is of; here the mean k3",
)
