"""Calibrated clipping: a clip band that cuts in FP8 what the usual band cuts in high precision.

Paper: arXiv 2609.22870, known through two notes; no code.
Claim: with FP8 in training as well, the mismatch is small, but noise in the ratio pushes negative tokens below 1 - eps;
they are no longer punished and the entropy surges. Every 20 steps two shadow forwards in high precision give the
ratios r_B beside the low-precision r_F, and the band [L, H] is set so that
L clips the same share of the negative tokens, and H keeps the ratio of positive to negative contributions,
    pos(r_F, H) / neg(r_F, L) = pos(r_B, 1 + eps_high) / neg(r_B, 1 - eps_low).
Notes start from a band of 0.6 to 1.8 (or 0.8 to 1.2). Ours: the first band, which is the algorithm's; the
contributions' exact form; the smoothing; where several bounds fit, the algorithm's own; a calibration at
every update of a calibration step once the policy has moved (with ratios of 1 nothing is clipped, and L would be the
smallest ratio). Left out: an FP8 trainer of its own; the method takes Jet-RL's, and any other part that puts the
trainer's forward in low precision does. Where it is in high precision, r_F = r_B and the band stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, Step, TokenBatch
from harness.objective.loss import bounded
from methods.flashrl import TIS
from methods.jet_rl import FP8Flow

MOVED = 1e-5
"""Nats: below this largest |log r_B| the policy is the old one, up to rounding."""
BISECTIONS = 40


def matched_low(ratio: Tensor, shadow: Tensor, bound: float) -> float:
    """L that clips as many of `ratio` as `bound` clips of `shadow`, [n] each; `bound` itself where it does.

    Else the quantile: the k-th smallest ratio, k the clipped count, or the smallest of all for k = 0.
    """
    k = int((shadow <= bound).sum())
    if int((ratio <= bound).sum()) == k:
        return bound
    return float(ratio.kthvalue(max(k, 1)).values)


def matched_high(ratio: Tensor, gain: Tensor, target: float, bound: float, most: float) -> float:
    """H in [1, most] at which the sum of gain over ratio <= H reaches `target`; `bound` where it is no further off.

    ratio, gain [n] float64, gain >= 0. Bisection on a step function that never falls.
    """

    def total(high: float) -> float:
        return float(torch.where(ratio <= high, gain, 0.0).sum())

    low, high = 1.0, most
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if total(middle) < target else (low, middle)
    return bound if abs(total(bound) - target) <= abs(total(high) - target) else high


def matched_band(
    ratio: Tensor, shadow: Tensor, adv: Tensor, low: float, high: float, most: float
) -> tuple[float, float] | None:
    """(L, H) of some tokens; None where one sign of the advantage is missing or everything is clipped.

    ratio, shadow, adv [n]: r_F, r_B and advantages; low, high: the high-precision band; most: the largest H.
    """
    ratio, shadow, size = ratio.double(), shadow.double(), adv.double().abs()
    up, down = adv > 0, adv < 0
    if not (bool(up.any()) and bool(down.any())):
        return None
    new_low = matched_low(ratio[down], shadow[down], low)
    punished = torch.where(down & (ratio >= new_low), ratio * size, 0.0).sum()
    punished_shadow = torch.where(down & (shadow >= low), shadow * size, 0.0).sum()
    rewarded_shadow = torch.where(up & (shadow <= high), shadow * size, 0.0).sum()
    if not float(punished_shadow) > 0:
        return None
    target = float(rewarded_shadow * (punished / punished_shadow))
    return new_low, matched_high(ratio[up], (ratio * size)[up], target, high, most)


@dataclass(frozen=True, kw_only=True)
class CalibratedClipping(Part):
    """Both clip bounds from a calibration against shadow ratios; the algorithm's until the first one."""

    sets_clip: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    losses: ClassVar[tuple[str, ...]] = ("ppo",)
    """The band is made for the ratio of each token to the old policy, so that is what it must cut."""
    needs_updates: ClassVar[int] = 2
    interval: int = 20
    """Steps from one calibration to the next; the authors find 10 and 40 as good."""
    smoothing: float = 0.9
    """Share of the old band after a calibration (ours)."""
    max_high: float = 5.0
    """Largest H that is searched."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"CalibratedClipping.interval: {self.interval} (choose 1 or more steps)")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"CalibratedClipping.smoothing: {self.smoothing} (choose 0 <= smoothing < 1)")
        if self.max_high <= 1:
            raise ValueError(f"CalibratedClipping.max_high: {self.max_high} (choose above 1)")

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"shadow"}) if step.index % self.interval == 0 else frozenset()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        if "shadow" in self.needs(b.step) and {"old", "current"} <= b.shadow.keys():
            self._calibrate(c, logp, b, memory)
        if "low" not in memory:
            return c
        low, high = torch.full_like(c.clip_low, memory["low"]), torch.full_like(c.clip_high, memory["high"])
        return replace(c, clip_low=low, clip_high=high)

    def _calibrate(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> None:
        """One calibration into `memory`: the band, and how many were made and skipped."""
        d, shadow = logp - b.old_logp, b.shadow["current"] - b.shadow["old"]
        usable = b.mask & c.keep & torch.isfinite(d) & torch.isfinite(shadow)
        d, shadow = bounded(d[usable]), bounded(shadow[usable])
        low, high = float(c.clip_low.max()), float(c.clip_high.min())
        band = None
        if d.numel() and min(float(d.abs().max()), float(shadow.abs().max())) > MOVED:
            band = matched_band(d.exp(), shadow.exp(), b.adv[usable], low, high, self.max_high)
        if band is None:
            memory["num_skipped"] = memory.get("num_skipped", 0.0) + 1.0
            return
        for name, start, new in (("low", low, band[0]), ("high", high, band[1])):
            memory[name] = self.smoothing * memory.get(name, start) + (1.0 - self.smoothing) * new
        memory["num_calibrations"] = memory.get("num_calibrations", 0.0) + 1.0


METHOD = Method(
    name="calibrated_clipping",
    paper="arXiv 2609.22870",
    parts=(FP8Flow(), TIS(), CalibratedClipping()),
    precisions=("fp8_block",),
    mode="decoupled",
    summary="a clip band that cuts in FP8 what the usual one cuts in high precision, with token TIS",
    claim="blockwise FP8 end to end averages 58.6 where plain FP8 has 54.1 and BF16 57.6",
    reconstructed="contributions, smoothing, guards, which updates calibrate; the FP8 trainer is Jet-RL's",
)
