"""Jet-RL: one FP8 flow for rollout and training (arXiv 2601.14243, sections 4.1 and 4.2; no code from its authors).

Claim: an FP8 rollout collapses under a BF16 trainer, above all with long outputs, and trains like BF16 where the
trainer computes in the same FP8 flow: the quantized inference graph is a subgraph of the trainer's forward graph, so
that what is left of the mismatch is the order of summation. No importance sampling is needed, and none is here.
The operand table is cross-checked with torchao prototype/blockwise_fp8_training and AMD's Lumen. Everything that is not
quantized is BF16 at both sites: embeddings, norm gains, biases, the head, gradients between layers; masters stay
float32. Left out: fused norm and activation quantizers, and FP8 weights on the wire (the engine makes the same codes).
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from harness.api import Fixed, Method, Part, Plan, weight_format
from harness.numerics.casting import cast_model
from harness.numerics.formats import Format, format_named
from harness.numerics.fp8_flow import FP8Linear
from harness.numerics.linear import CastLinear


def is_flow(weights: Format | None, acts: Format | None) -> bool:
    """True for FP8 weights in square tiles, whose transpose has the same codes, with FP8 inputs in runs."""
    if weights is None or acts is None or weights.tile is None or acts.tile is None:
        return False
    is_square, is_run = weights.tile[0] == weights.tile[1], acts.tile[0] == 1 and acts.tile[1] > 0
    return is_square and is_run and weights.element == acts.element == "e4m3" and weights.scale_dtype == "fp32"


def _name(fmt: Format | None) -> str | None:
    return None if fmt is None else fmt.name


@dataclass(frozen=True, kw_only=True)
class FP8Flow(Part):
    """The trainer's linears compute in the rollout's own formats, forward and backward; the rest of it in BF16."""

    deploys_rollout: ClassVar[bool] = True
    sets_linears: ClassVar[bool] = True

    fp8_saved_activations: bool = True
    """The backward pass reads inputs back from FP8, which rounds dW's operand twice, with BF16 between (ours; Lumen
    requantizes from float32); False keeps them in BF16 (torchao). The paper saves FP8, but does not say whether it
    rounds once or twice."""

    def plan(self, rollout: Plan) -> Plan:
        if not is_flow(rollout.rollout_weights, rollout.rollout_acts):
            weights, acts = _name(rollout.rollout_weights), _name(rollout.rollout_acts)
            raise ValueError(f"FP8Flow: weights={weights}, acts={acts} is no FP8 block flow; choose fp8_block")
        return Plan(train_compute=rollout.rollout_weights)

    def wrap(self, model: nn.Module, plan: Plan, fixed: Fixed) -> nn.Module:
        modules: list[tuple[str, nn.Module]] = list(model.named_modules())
        twins = [(name, twin) for name, module in modules if (twin := self._twin(name, module, plan)) is not None]
        if not any(isinstance(twin, FP8Linear) for _, twin in twins):
            raise ValueError("FP8Flow: the model has no plain linear layer under a name that the rollout quantizes")
        for name, twin in twins:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, twin)
        return cast_model(model, format_named("bf16"))

    def _twin(self, name: str, module: nn.Module, plan: Plan) -> nn.Module | None:
        """The twin of a linear layer that the plan gives a format; None for all other modules."""
        fmt = weight_format(plan, f"{name}.weight") if isinstance(module, nn.Linear) else None
        if fmt is None or not isinstance(module, nn.Linear):
            return None
        if type(module) is not nn.Linear:
            raise ValueError(f"FP8Flow: {name} is a {type(module).__name__} already; no other part may wrap it")
        if name == "lm_head":  # the engine gives its input no format of its own
            if fmt.tile is not None:
                raise ValueError(f"FP8Flow: lm_head={fmt.name} is no plain cast; choose fp32, bf16 or fp16")
            return CastLinear(module, fmt)
        assert plan.rollout_acts is not None
        saved = self.fp8_saved_activations
        return FP8Linear(module, weights=fmt, acts=plan.rollout_acts, fp8_saved_activations=saved)


METHOD = Method(
    name="jet_rl",
    paper="arXiv 2601.14243",
    parts=(FP8Flow(),),
    precisions=("fp8_block",),
    summary="the trainer computes in the rollout's FP8 blocks, forward and backward",
    claim="FP8 end to end trains like BF16 where a BF16 trainer with FP8 rollouts collapses",
    reconstructed="whether the weight gradient's input is rounded once or twice",
)
