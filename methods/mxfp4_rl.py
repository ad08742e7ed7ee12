"""MXFP4 RL: W4A4 rollouts in microscaled 4-bit floats, with three repairs of their error.

Paper: arXiv 2605.20402; known from the authors' article and notes.
Claim: plain MXFP4 rollouts lose what macro-block scaling, outlier fallback and noise bring back (BF16 91.5, MXFP4 88.8,
with all three 92.5 on a mixture of experts of 30B; GRPO with TIS).
A block of 32 with the largest magnitude M has s* = M / 6 and the stored scale s, the power of two at or above s*. The
error of rounding x is the sum of three, exactly: that of the scale, Q(x) - Q*(x); that of the dead zone |x| < M / 24,
where Q* is 0; and that of the grid, Q*(x) - x elsewhere. Q rounds with s, Q* with s*.

    MBS   xhat = Q((1 + mm) x) / (1 + mm), mm of 8 bits for every 128: precision=mxfp4_mbs_w4a4; without: mxfp4_up_w4a4
    OF    xhat = Q(x) + alpha Q(x - Q(x)), alpha 0.5: the engine's second pass over inputs, all channels of it
    AQN   QeRL's noise on norm gains (`methods.qerl`), sigma from 1e-2 to 1e-3

Ours, since the source does not say: mm is the nearest to s / s* - 1 of the largest of the four blocks; OF is for the
inputs of linear layers, since twice the codes of a weight would be more than 4 bits; sigma is absolute. Which norm
gains or weights the paper's percentages refer to is not known. Left out: OF on weights, and a trainer that computes in
MXFP4 (`qat_aligned.AlignedQAT` among the parts puts the weights' codes into its forward pass, without OF).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.api import Fixed, Memory, Method, Part, Plan, Step, WeightStream, weight_format
from harness.numerics import tiles
from harness.numerics.formats import format_named
from harness.numerics.quantize import fake_quantize
from harness.numerics.rounding import round_float_
from methods.flashrl import TIS
from methods.qerl import AQN

MXFP4 = format_named("mxfp4_rceil")
TERMS = ("scale", "dead_zone", "grid")


def error_terms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of the scale, the dead zone and the grid of MXFP4 for `x` [..., N, K] of any float dtype: float32, of its
    shape. Their sum is the error of rounding, up to float32."""
    assert MXFP4.tile is not None
    x = x.detach().float()
    view = tiles.split(x, MXFP4.tile)
    largest = tiles.amax(view, MXFP4.tile)
    ideal = (largest / 6.0).clamp_min(torch.finfo(torch.float32).tiny)
    star = round_float_(view / ideal, "e2m1").mul_(ideal)
    is_dead = view.abs() < largest / 24.0
    dead, grid = (torch.where(where, star - view, 0.0) for where in (is_dead, ~is_dead))
    dead, grid, star = (tiles.join(part, MXFP4.tile, x.shape) for part in (dead, grid, star))
    return fake_quantize(x, MXFP4) - star, dead, grid


@dataclass(frozen=True, kw_only=True)
class OutlierFallback(Part):
    """A second pass over the rounding errors of all inputs of linear layers, counted in part."""

    alpha: float = 0.5
    """Factor of the second pass; the paper's. 0 turns it off."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"OutlierFallback.alpha: {self.alpha} (choose 0 to 1)")

    def plan(self, rollout: Plan) -> Plan:
        if self.alpha == 0.0:
            return Plan()
        if rollout.rollout_acts is None or rollout.rollout_acts.tile is None:
            raise ValueError("OutlierFallback: the inputs are not rounded, so there is no error; choose mxfp4_mbs_w4a4")
        return Plan(residual=1.0, residual_alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class MXErrors(Part):
    """Metrics of every push: the squared error of each term over that of rounding, in the weights that are rolled out
    in MXFP4, as if they were without MBS. They sum to 1 less twice the product of scale and grid."""

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        return weights if step.purpose != "rollout" else self._measured(weights, plan, memory)

    def _measured(self, weights: WeightStream, plan: Plan, memory: Memory) -> Iterator[tuple[str, Tensor]]:
        squares, total = [0.0, 0.0, 0.0], 0.0
        for name, w in weights:
            fmt = weight_format(plan, name)
            if fmt is not None and fmt.element == "e2m1" and fmt.tile == MXFP4.tile:
                scale, dead, grid = errors = error_terms(w)
                squares = [s + float(e.square().sum()) for s, e in zip(squares, errors, strict=True)]
                total += float((scale + dead + grid).square().sum())
            yield name, w
        if total > 0.0:
            memory |= {f"{term}_share": s / total for term, s in zip(TERMS, squares, strict=True)}


METHOD = Method(
    name="mxfp4_rl",
    paper="arXiv 2605.20402",
    parts=(TIS(), OutlierFallback(), AQN(sigma_start=1e-2, sigma_end=1e-3), MXErrors()),
    precisions=("mxfp4_mbs_w4a4", "mxfp4_up_w4a4"),
    summary="W4A4 rollouts in MXFP4, macro-block scaling, a second pass over inputs, falling noise, token TIS",
    claim="W4A4 rollouts in MXFP4 reach BF16 once scales, outliers and noise are seen to",
    reconstructed="the block that sets the mantissa, inputs alone in the second pass, what the noise is on",
)
