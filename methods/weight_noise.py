"""Control: random noise in the sampler's weights, a mismatch of any size that no format makes.

Claim: none. Rounding is an error that hangs on the weights. Is it worse than noise that makes the same k3? Gaussian
noise of `sigma` times the row's root mean square is added to every matrix that a rollout format rounds, as formats
with a scale per row err alike along it; the engine then rounds to BF16, as without noise.
Two draws, because they ask two things. "fixed": one draw for the whole run, added to the newest weights at every push:
an error that lasts, in a direction that has nothing to do with the weights. "fresh": a new draw at every push: an error
that averages out over the steps. A format lies between: its error lasts while weights move by less than a step of it.
A draw is a function of (run seed, tensor name), and of the step where it is fresh: ranks agree, a resumed run repeats
it. The sampler is evaluated with its noise, as it is in its format. No format changes, so plan and passport say BF16;
config and columns say the noise, and a push whose noise did not arrive ends the run.
`lowbit probe --noise-like nvfp4` finds the sigma of a format's k3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from harness.api import QUANTIZED, Fixed, Memory, Method, Part, Plan, Step, WeightStream
from harness.foundation.seeds import generator
from harness.numerics.rounding import CASTS
from methods.qerl import held_dtype

TOLERANCE = 0.1
"""Relative distance between planned and realized sigma from which on the noise did not arrive."""


def row_noise(weight: Tensor, sigma: float, rng: torch.Generator) -> Tensor:
    """sigma x the row's root mean square x N(0, 1), float32 [N, K] on the weight's device; weight [N, K] float."""
    z = torch.randn(weight.shape, generator=rng).to(weight.device)
    return sigma * weight.float().square().mean(1, keepdim=True).sqrt() * z


@dataclass(frozen=True, kw_only=True)
class WeightNoise(Part):
    """Gaussian noise in the linear layers of the sampler."""

    sigma: float = 0.05
    """Standard deviation over the root mean square of the row."""
    draw: Literal["fixed", "fresh"] = "fixed"
    """fixed: one draw for the run; fresh: one for every push."""

    def __post_init__(self) -> None:
        if not 1e-2 <= self.sigma <= 10:
            raise ValueError(
                f"WeightNoise.sigma: {self.sigma} is not from 0.01 to 10; rounding to BF16 adds as much to less"
            )

    def plan(self, rollout: Plan) -> Plan:
        for fmt in (rollout.rollout_weights, rollout.rollout_acts):
            if fmt is not None and fmt.element not in CASTS:
                raise ValueError(f"precision: {fmt.name} beside WeightNoise are two doses; valid: bf16, fp32")
        return Plan()

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        memory |= {"sigma": self.sigma, "sigma_realized": 0.0}
        return self._noised(weights, step, plan, memory)

    def _noised(self, weights: WeightStream, step: Step, plan: Plan, memory: Memory) -> Iterator[tuple[str, Tensor]]:
        place = ("weight_noise",) if self.draw == "fixed" else ("weight_noise", step.index)
        added, own = 0.0, 0.0
        for name, weight in weights:
            if any(fnmatchcase(name, pattern) for pattern in QUANTIZED):
                noised = weight.float() + row_noise(weight, self.sigma, generator("cpu", step.seed, *place, name))
                noised, dtype = noised.to(weight.dtype), held_dtype(plan, name)
                added += float((noised.to(dtype).float() - weight.to(dtype).float()).square().sum())
                own += float(weight.float().square().sum())
                weight = noised
            yield name, weight
        realized = (added / own) ** 0.5 if own else 0.0
        if abs(realized - self.sigma) > TOLERANCE * self.sigma:
            raise RuntimeError(
                f"WeightNoise.sigma: {self.sigma:g} planned, {realized:g} arrived in the engine's weights"
            )
        memory["sigma_realized"] = realized


METHOD = Method(
    name="weight_noise",
    paper="",
    parts=(WeightNoise(),),
    precisions=("bf16", "fp32"),
    summary="random noise in the sampler's weights, as large as a format's rounding",
    is_control=True,
)
