"""QeRL: LoRA over an NVFP4 base that both sites share, and falling noise on the sampler's norm gains (AQN).

Paper: arXiv 2510.11696; code NVlabs/QeRL.
Claim: quantization noise is exploration. A frozen 4-bit base is sampled and trained at once, and N(0, sigma^2) added to
the gains that feed q, k, v and gate, up (eq. 10), in the rollout alone, raises entropy and reward; sigma falls in
stages (`harness.numerics.noise_schedule`). No importance correction: the gap that the noise opens is there by design.
One draw per push, as in Algorithm 1 and the code (the text says one per forward pass); final, q and k norms stay clean.
A draw is a function of (run seed, step, tensor name), added to clean gains: ranks agree, a resumed run repeats it,
nothing adds up. Evaluation is without noise.
BF16 cannot hold the schedule: a gain in [1, 2) keeps a draw only beyond 0.0039, so from sigma = 1e-3 on almost nothing
arrives. Equation 10 has no such limit, so by default the engine keeps these gains in float32 and the planned sigma is
the realized one; `fp32_gains=false allow_rounded_noise=true` is a 16-bit engine. `qerl_no_aqn` has float32 gains too,
so that it differs by the noise alone (at bf16: from `aqn_bf16`).
Left out: the released matching by class (nothing matches in vLLM), noise per forward pass. sigma 1e-2 to 5e-4 is the
paper's table; its scripts end at 1e-4, its section 4.1 starts at 5e-2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.api import Fixed, Memory, Method, Part, Plan, Step, WeightStream, base_dtype, weight_format
from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.noise_schedule import Decay, Definition, stage, stage_sigma, survival
from harness.numerics.rounding import CASTS
from methods.qlora import NORMS, LoRA

BEYOND_SIGMA = 0.3173
"""P(|Z| > sigma): what passes a rounding whose half step is one sigma."""


def held_dtype(plan: Plan, name: str) -> torch.dtype:
    """Engine's dtype of a weight that no scale belongs to: as an exception says, else the engine's own."""
    fmt = weight_format(plan, name)
    return base_dtype(plan) if fmt is None else CASTS[fmt.element]


@dataclass(frozen=True, kw_only=True)
class AQN(Part):
    """Adaptive quantization noise: Z ~ N(0, sigma^2) on two gains per block, at rollout pushes."""

    schedule: Definition = "trainer"
    """trainer and repo reach sigma_end at the last stage, trainer one step earlier, as released; paper (eq. 8) stops
    short of it."""
    decay: Decay = "exponential"
    """The authors' choice; the formulas of the others are reconstructed."""
    num_stages: int = 10
    sigma_start: float = 1e-2
    """Standard deviation of stage 1; stage 0 is without noise. 0 turns the noise off."""
    sigma_end: float = 5e-4
    gain_scale: float = 1.0
    """Multiplies sigma: UAQ's s beside UAQ, which multiplies the gains by it (ours)."""
    fp32_gains: bool = True
    """The engine keeps the noised gains in float32; else in its 16-bit dtype."""
    allow_rounded_noise: bool = False
    """Run a schedule that rounding the gains swallows in part."""

    def __post_init__(self) -> None:
        low = 0.0 if self.decay != "exponential" or self.sigma_start == 0.0 else 1e-300
        if not (0.0 <= self.sigma_start < 1e3 and low <= self.sigma_end < 1e3):
            raise ValueError(
                f"AQN.sigma_start, sigma_end: {self.sigma_start}, {self.sigma_end}; at least 0, exponential above 0"
            )
        if self.num_stages < 2:
            raise ValueError(f"AQN.num_stages: {self.num_stages} has no stage with noise (choose 2 or more)")
        if self.gain_scale <= 0:
            raise ValueError(f"AQN.gain_scale: {self.gain_scale} is not a positive factor")

    def stage_sigma(self, at: int) -> float:
        """The planned sigma of a stage."""
        return self.gain_scale * stage_sigma(
            at, num_stages=self.num_stages, start=self.sigma_start, end=self.sigma_end, definition=self.schedule,
            decay=self.decay,
        )  # fmt: skip

    def sigma(self, step: Step) -> float:
        """The planned sigma at a step."""
        return self.stage_sigma(stage(step.index, step.total, self.num_stages, self.schedule))

    def plan(self, rollout: Plan) -> Plan:
        return Plan(exceptions=tuple((f"*{name}", format_named("fp32")) for name in NORMS) if self.fp32_gains else ())

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        if self.sigma_start == 0.0 or self.allow_rounded_noise or self.fp32_gains:
            return
        sigma = min(s for at in range(1, self.num_stages) if (s := self.stage_sigma(at)) > 0.0)
        gain, dtype = torch.tensor(self.gain_scale), held_dtype(plan, f"model.layers.0.{NORMS[0]}")
        if (kept := float(survival(gain, sigma, dtype))) < BEYOND_SIGMA:
            raise ValueError(
                f"knobs.AQN.fp32_gains=false: a gain of {self.gain_scale:g} in {str(dtype).removeprefix('torch.')} "
                f"keeps only {kept:.1%} of the draws of sigma {sigma:g}; valid: true, a larger knobs.AQN.sigma_end, or "
                "knobs.AQN.allow_rounded_noise=true"
            )

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        if step.purpose != "rollout":
            return weights
        sigma = self.sigma(step)
        memory |= {"sigma": sigma, "sigma_realized": 0.0}
        return weights if sigma == 0.0 else self._noised(weights, step, sigma, plan, memory)

    def _noised(
        self, weights: WeightStream, step: Step, sigma: float, plan: Plan, memory: Memory
    ) -> Iterator[tuple[str, Tensor]]:
        arrived: list[Tensor] = []
        for name, gain in weights:
            if name.endswith(NORMS):
                z = torch.randn(gain.shape, generator=generator("cpu", step.seed, "aqn", step.index, name))
                noised, dtype = gain + sigma * z.to(gain), held_dtype(plan, name)
                arrived.append(noised.to(dtype).float() - gain.to(dtype).float())
                gain = noised
            yield name, gain
        if not arrived:
            raise ValueError(f"AQN: no weight of the model ends in {' or '.join(NORMS)}, so no noise would act")
        memory["sigma_realized"] = float(torch.cat(arrived).std(correction=0))


METHOD = Method(
    name="qerl",
    paper="arXiv 2510.11696",
    parts=(LoRA(), AQN()),
    precisions=("nvfp4", "mxfp4", "nf4", "int4"),
    summary="LoRA over a 4-bit base that both sites share, falling noise on the sampler's norm gains",
    claim="an NVFP4 base with adaptive noise learns faster than BF16 LoRA and ends near full fine-tuning",
    reconstructed="float32 gains in the engine, so that small noise is not rounded away; decays but the exponential",
)
QERL_NO_AQN = replace(
    METHOD,
    name="qerl_no_aqn",
    parts=(LoRA(), AQN(sigma_start=0.0)),
    precisions=(*METHOD.precisions, "bf16"),
    summary="LoRA over a 4-bit base that both sites share, no noise",
    claim="a shared NVFP4 base alone already matches BF16 LoRA",
    reconstructed="float32 gains in the engine, as in qerl",
)
AQN_BF16 = replace(
    METHOD,
    name="aqn_bf16",
    precisions=("bf16",),
    summary="control for qerl: the same noise over an unquantized base",
    claim="",
    is_control=True,
)
