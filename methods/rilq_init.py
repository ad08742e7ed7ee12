"""RILQ-init: LoRA trained over a frozen low-bit base at both sites, from adapters that already undo the base's error.

Ours (compensation.md, section 3.2); the fit is RILQ's, arXiv 2412.01129, the arrangement QeRL's, arXiv 2510.11696.
Claim: RL from q(W_0) starts below W_0 where the base has 2 or 3 bits; from q(W_0) + C it starts at W_0, with the
mismatch of a shared base (the engine's 16-bit rounding alone). `start` none, svd, loftq and cloq are its controls at
equal rank: QLoRA, LoRC, LoftQ and CLoQ starts.
Left out: activation formats, under which the two sites would differ again (`LoRA` refuses them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.api import Method, Part, Plan, Site
from harness.fitting.adapter_start import without_shift
from harness.fitting.low_bit_decoder import LORA_A, LORA_B
from methods.flashrl import TIS
from methods.qlora import LoRA
from methods.rilq import Compensation


@dataclass(frozen=True, kw_only=True)
class RILQInit(Compensation):
    """The trained adapters' start; rank, scale and layers are those of the part that plans them (`LoRA`)."""

    def plan(self, rollout: Plan) -> Plan:
        if rollout.rollout_weights is None or rollout.rollout_weights.tile is None:
            name = "none" if rollout.rollout_weights is None else rollout.rollout_weights.name
            raise ValueError(f"RILQInit: rollout weights {name} leave no error to make up for; choose int2 to nvfp4")
        return Plan()

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        if plan.adapters is None or not plan.adapters.is_trained or plan.adapters.site != "both":
            raise ValueError("RILQInit: no part plans trained adapters at both sites; add qlora.LoRA")
        super().check(plan, parts, shapes)

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        base = site.build(site.checkpoint)
        held = self.adapters(site, base, plan)
        start = {name: tensor for name, tensor in held.items() if name.endswith((LORA_A, LORA_B))}
        if len(start) == len(held):
            return None, start
        with torch.no_grad():  # LoftQ's base is the quantized value of shifted weights
            for name, parameter in base.named_parameters():
                parameter.copy_(without_shift(name, parameter, held))
        return base, start


METHOD = Method(
    name="rilq_init",
    paper="arXiv 2412.01129",
    parts=(LoRA(rank=16, alpha=4.0), RILQInit(g=0.0, lr=1e-3), TIS()),
    precisions=("int2", "int3", "int4", "nvfp4", "mxfp4", "nf4"),
    summary="LoRA over a low-bit base that both sites share, started from adapters that undo its error, and token TIS",
    claim="training from adapters that undo the base's error starts where the unquantized base stands",
    reconstructed="RILQ's adapters trained by RL; the fit's data, rank and rate; no cross entropy of text",
)
