"""FlashRL: quantized rollouts made safe by truncated importance sampling.

Paper: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", blog of August 2025, OpenReview
8MHqvb4lK9 (no arXiv id); code yaof20/Flash-RL.
Claim: INT8 or FP8 rollouts keep the BF16 curve when each token's loss is weighted by min(pi_old / pi_rollout, C), C = 2
for small and 8 for 32B models. INT8 scales are calibrated once, on the initial weights, and reused at every sync,
because RL updates are small; FP8 is quantized online, so the profile leaves it alone.
Left out: engine patches; the smoothing multipliers of its profile, which exist only where SmoothQuant made the INT8
checkpoint; `int8_prune`. Formats below 8 bits are not the paper's: they are quantized online, under the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from harness.api import (
    Correction,
    Fixed,
    Memory,
    Method,
    Part,
    Plan,
    Sequences,
    Site,
    Step,
    TokenBatch,
    WeightStream,
    linear_setters,
    weight_format,
)
from harness.numerics.formats import Format
from harness.numerics.quantize import quantize, receiver_scale
from harness.objective.loss import bounded
from methods.naive import LOW_BIT

Level = Literal["token", "sequence", "geometric"]


def log_rho(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, level: Level) -> Tensor:
    """log(pi_old / pi_rollout) at a level, [B, T] nats, unclamped; 0 where there is no valid token.

    old_logp, rollout_logp [B, T] float, constants; mask [B, T] bool. token: d; sequence: the sum of d over the mask;
    geometric: its mean; the last two broadcast to every token. Tokens without two finite log-probs do not count.
    """
    d = old_logp - rollout_logp
    valid = mask & torch.isfinite(d)
    d = torch.where(valid, d, 0.0)
    if level == "token":
        return d
    total = d.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(d)


def truncated_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """min(exp(log_ratio), cap), [B, T] float; the log-ratio is clamped to +-20 first."""
    return bounded(log_ratio).exp().clamp(max=cap)


def is_profiled(fmt: Format | None) -> bool:
    """True for per-channel INT8, the one format whose scales FlashRL freezes."""
    return fmt is not None and fmt.element == "int8" and fmt.tile == (1, 0)


def has_profiled(plan: Plan) -> bool:
    """True where some weight of the rollout is in such INT8."""
    return any(is_profiled(fmt) for fmt in (plan.rollout_weights, *(fmt for _, fmt in plan.exceptions)))


def frozen_scales(weights: Iterable[tuple[str, Tensor]], plan: Plan) -> dict[str, Tensor]:
    """Scales of every tensor that the plan rolls out in per-channel INT8: "<name>_scale" -> [N, 1] float32."""
    scales: dict[str, Tensor] = {}
    for name, tensor in weights:
        fmt = weight_format(plan, name)
        if fmt is not None and is_profiled(fmt):
            scales[f"{name}_scale"] = receiver_scale(quantize(tensor, fmt))
    return scales


def saturated(weight: Tensor, scale: Tensor) -> Tensor:
    """Number of weights beyond 127.5 scales, int64 []. weight [N, K] float, scale [N, 1] float32."""
    return (weight.float().abs() > 127.5 * scale.view(-1, 1)).sum()


@dataclass(frozen=True, kw_only=True)
class Profile(Part):
    """INT8 scales calibrated once. Other formats pass unchanged."""

    idle_by: ClassVar[Mapping[str, str]] = {"refit": "refit_above=null"}
    refit_above: float | None = None
    """Saturated fraction that triggers a new calibration; None never does. 1e-4 is a sensible alarm (ours)."""
    keep_high: tuple[str, ...] = ()
    """Patterns of weights that stay in the engine's base dtype, such as "model.layers.0.*"."""

    def plan(self, rollout: Plan) -> Plan:
        return Plan(exceptions=tuple((pattern, None) for pattern in self.keep_high))

    def idle(self, plan: Plan) -> frozenset[str]:
        if not has_profiled(plan):
            return frozenset({"prepare", "sync", "refit"})
        return frozenset({"refit"} if self.refit_above is None else ())

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        if has_profiled(plan) and (others := linear_setters(parts, plan)):
            name = type(others[0]).__name__
            raise ValueError(f"Profile: {name} has INT8 scales of its own, which frozen ones would replace; choose one")

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        if not has_profiled(plan):
            return None, {}
        return None, frozen_scales(site.build(site.checkpoint).named_parameters(), plan)

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        counts, total = list[Tensor](), 0
        for name, tensor in weights:
            scale = fixed.get(f"{name}_scale")
            if scale is not None and is_profiled(weight_format(plan, name)):  # another sampler may have another format
                scale = scale.to(tensor.device)
                counts.append(saturated(tensor, scale))
                total += tensor.numel()
                yield f"{name}_scale", scale
            yield name, tensor
        if counts:
            memory["profile_saturated_frac"] = float(torch.stack(counts).sum()) / total

    def refit(
        self, model: nn.Module, seqs: Sequences, batch: TokenBatch, step: Step, plan: Plan, fixed: Fixed, memory: Memory
    ) -> Fixed | None:
        if self.refit_above is None or memory.get("profile_saturated_frac", 0.0) <= self.refit_above:
            return None
        memory["profile_refits"] = memory.get("profile_refits", 0.0) + 1.0
        return frozen_scales(model.named_parameters(), plan)


@dataclass(frozen=True, kw_only=True)
class TIS(Part):
    """Truncated importance sampling: the weight min(rho, cap), a constant, no lower bound."""

    sets_weight: ClassVar[bool] = True
    cap: float = 2.0
    """Largest weight; the paper's C: 2 for GSM8K with 0.5B, 8 for DAPO with 32B."""
    level: Level = "token"
    """sequence: the product over the response, as in verl; geometric: its geometric mean over the tokens."""

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(f"TIS.cap: {self.cap} is not a positive weight")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        return replace(c, weight=truncated_weight(log_rho(b.old_logp, b.rollout_logp, b.mask, self.level), self.cap))


METHOD = Method(
    name="flashrl",
    plain_name="Truncated importance weights",
    paper="OpenReview 8MHqvb4lK9",
    parts=(Profile(), TIS()),
    precisions=LOW_BIT,
    summary="INT8 scales calibrated once or FP8 online, with token TIS",
    claim="INT8 rollouts with TIS follow the BF16 curve of a 32B model",
)
