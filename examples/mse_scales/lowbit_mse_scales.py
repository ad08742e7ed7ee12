"""MSE scales: scales that minimise the rounding error, as an example of a sampler-side method outside the project.

Claim: none; it is an example. Rounding to nearest takes the scale from the largest weight of a group. A smaller scale
cuts that weight and rounds the others more finely. Here every group gets the factor of least squared error:

    f* = argmin over f of || w - round(w; f * absmax / largest code) ||^2

The part sends its scales beside the weights, as `<name>_scale`, and the engine uses them as they are. Left out: formats
without one plain scale per row or group of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.api import Fixed, Memory, Method, Part, Plan, Step, WeightStream, weight_format
from harness.numerics.formats import Format
from harness.numerics.quantize import fake_quantize, quantize
from methods.flashrl import TIS


def has_row_groups(fmt: Format | None) -> bool:
    """True for symmetric integers with one scale per row, or per group of columns."""
    return fmt is not None and fmt.symmetric and fmt.element.startswith("int") and (fmt.tile or (0,))[0] == 1


def mse_scale(w: Tensor, fmt: Format, factors: tuple[float, ...]) -> Tensor:
    """The stored scale [N, groups] of `w` [N, K] float, times the factor of least squared error per group."""
    plain = quantize(w, fmt).scale
    assert plain is not None
    groups = plain.shape[1]
    errors = [
        (w.float() - fake_quantize(w, fmt, scale=plain * factor)).square().view(len(w), groups, -1).sum(-1)
        for factor in factors
    ]
    best = torch.stack(errors).argmin(0)
    return plain * torch.tensor(factors, device=w.device)[best]


@dataclass(frozen=True, kw_only=True)
class MSEScales(Part):
    """Scales of least squared error at every push."""

    factors: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8)
    """Factors on the largest weight of a group that are tried."""

    def __post_init__(self) -> None:
        if not self.factors or not all(0 < factor <= 1 for factor in self.factors):
            raise ValueError(f"MSEScales.factors: {self.factors} (choose one or more in (0, 1])")

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        for name, tensor in weights:
            fmt = weight_format(plan, name)
            if fmt is not None and has_row_groups(fmt):
                yield f"{name}_scale", mse_scale(tensor, fmt, self.factors)
            yield name, tensor


METHOD = Method(
    name="mse_scales",
    parts=(MSEScales(), TIS()),
    precisions=("int4", "int8"),
    summary="rollout scales of least squared error, with token TIS",
)
