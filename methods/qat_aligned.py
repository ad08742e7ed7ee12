"""Aligned 4-bit QAT: the trainer computes with the rollout's own weight codes. QUADS: and the rollout reads its
activations' rounding errors in a second pass.

Sources: INT4 in slime and miles (LMSYS, January 2026; fake_int4_quant_cuda.cu), NVFP4 in verl's QAT recipe and NeMo-RL;
QUADS is arXiv 2607.15810, known through notes.
Claim: W4A16 rollouts under a BF16 trainer drift two orders of magnitude and crash; with the same codes in the trainer's
forward pass, and the gradient passed straight through to the master, the run equals BF16. For W4A4 the trainer rounds
weights alone (rounding activations there as well widened the gap), and the rollout computes
W_hat Q(x) + W_hat[:, S] Q(x - Q(x))_S over the half S of the channels with the largest mean error.
The codes that travel are those of `naive`: what changes is the trainer's forward pass. Served in high precision such
weights drift too; the reference evaluation reads them on their grid. Ours: S is chosen at every push, on held-out
prompts.
slime's INT4 scales are kept in BF16, here in float32 (`int4_g128_qat`).
Left out: packing, kernels (emulated, the second pass saves no time), routers of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from harness.api import Fixed, Method, Part, Plan, RolloutEngine
from harness.fitting.fake_quant import fake_quantized
from harness.numerics.formats import format_named

ATTENTION = "*.self_attn.*_proj.weight"


def is_low_bit(plan: Plan) -> bool:
    """True where the rollout's weights have scales: with plain casts there is nothing to align."""
    return plan.rollout_weights is not None and plan.rollout_weights.tile is not None


@dataclass(frozen=True, kw_only=True)
class AlignedQAT(Part):
    """Every linear layer that is rolled out in low precision computes with the same codes in the trainer."""

    sets_linears: ClassVar[bool] = True
    scope: Literal["all", "ffn"] = "all"
    """ffn: attention stays in high precision at both sites, as where only experts are quantized."""
    acts: bool = False
    """Quantize the trainer's activations as the rollout does (QaRL); False: weights alone (QUADS)."""
    compute: Literal["fp32", "bf16"] = "fp32"
    """bf16: everything else in the trainer is rounded to bf16 too, forward and backward, as in the engine."""
    ste_clip: bool = False
    """No gradient for weights whose code is clipped; the sources pass it through."""

    def idle(self, plan: Plan) -> frozenset[str]:
        return frozenset() if is_low_bit(plan) else frozenset({"plan", "wrap"})

    def plan(self, rollout: Plan) -> Plan:
        if not is_low_bit(rollout):
            return Plan()
        return Plan(
            train_compute=format_named("bf16") if self.compute == "bf16" else None,
            exceptions=((ATTENTION, None),) if self.scope == "ffn" else (),
        )

    def wrap(self, model: nn.Module, plan: Plan, fixed: Fixed) -> nn.Module:
        if not is_low_bit(plan):
            return model
        base = format_named("bf16") if self.compute == "bf16" else None
        return fake_quantized(model, plan, fixed=fixed, is_w_and_a=self.acts, base=base, ste_clip=self.ste_clip)


@dataclass(frozen=True, kw_only=True)
class ResidualPass(Part):
    """The rollout's second pass over the rounding errors of its inputs."""

    ratio: float = 0.5
    """Share of the input channels; the paper's half."""

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ResidualPass.ratio: {self.ratio} is no share of channels (choose above 0, at most 1)")

    def plan(self, rollout: Plan) -> Plan:
        acts = rollout.rollout_acts
        if acts is None or acts.tile is None:
            name = None if acts is None else acts.name
            raise ValueError(f"ResidualPass: acts={name} leaves no rounding error to read; choose nvfp4_w4a4")
        return Plan(residual=self.ratio)

    def after_sync(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> None:
        engine.calibrate_residual(prompts)


METHOD = Method(
    name="qat_aligned",
    paper="LMSYS, January 2026",
    parts=(AlignedQAT(),),
    precisions=(
        "int4", "nvfp4", "int3", "int2", "mxfp4", "nf4", "w8a16", "nvfp4_w4a4", "mxfp4_w4a4", "int8", "fp8_channel",
        "fp8_tensor", "fp8_block", "mxfp8",
    ),
    summary="the trainer's forward pass reads the rollout's weight codes",
    claim="INT4 and NVFP4 weight-only rollouts train like BF16",
)  # fmt: skip
QUADS = Method(
    name="quads",
    paper="arXiv 2607.15810",
    parts=(AlignedQAT(), ResidualPass()),
    precisions=("nvfp4_w4a4", "mxfp4_w4a4"),
    summary="weight codes in the trainer, and a second pass over the largest rounding errors in a 4-bit rollout",
    claim="W4A4 rollouts reach BF16 where naive NVFP4 loses a third of the score",
    reconstructed="how the channels of the second pass are chosen, and when",
)
