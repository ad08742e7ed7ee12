"""QuRL: a clip range that follows the truncation (ACR), and weights rescaled so that updates change codes (UAQ).

Paper: arXiv 2602.13953, OpenReview eG0bpCwdKn (ICLR 2026); no public code, read through notes that agree on ACR.
Claim: truncating the weight at C also lowers the level at which positive tokens clip; the upper bound
(1 + eps) max(1, rho / C) gives it back (eq. 9). Updates of 1e-6 hardly move INT8 codes; dividing weights by s = 1.5,
with s absorbed by the norm before them (eq. 11, 12), enlarges them relative to the bin.
Derived here: absmax codes of W / s are those of W, so what changes is the step. Under Adam the gain is s (s^2 under
SGD), the same as a learning rate times s on the matrices and 1 / s on the gains: `qurl_lr` is that control. The two
differ in Adam's epsilon, in global-norm clipping and in weight decay, which acts s times stronger in the control.
Left out: the base algorithm (GRPO, k3 KL 1e-3 to the reference) and the authors' rule to drop UAQ at large learning
rates, both settings of the run. Scales are recomputed at every push, as in any method without a profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from harness.api import Correction, Memory, Method, Part, Plan, Site, TokenBatch
from harness.numerics.formats import Format
from harness.numerics.invariant_scaling import Scope, is_power_of_two, role_of, scaled
from methods.flashrl import TIS, log_rho, truncated_weight
from methods.naive import LOW_BIT
from methods.rilq import Compensation


def adaptive_clip(clip_high: Tensor, log_ratio: Tensor, cap: float, u_max: float | None = None) -> Tensor:
    """The upper clip bound u = clip_high * max(1, rho / cap), [B, T] float, constants.

    clip_high [B, T] is 1 + eps_high; log_ratio [B, T] = log rho nats. At R = u the truncated term equals
    (1 + eps_high) rho A, what the untruncated one may reach. u_max bounds u, never below clip_high.
    """
    wide = clip_high * (truncated_weight(log_ratio, float("inf")) / cap).clamp(min=1.0)
    return wide if u_max is None else torch.maximum(wide.clamp(max=u_max), clip_high)


def check_scale(part: str, s: float, plan: Plan) -> None:
    """Raise ValueError where a format of `plan` has power-of-two scales and s is not one: nearly every code changes."""
    formats: list[Format | None] = [plan.rollout_weights, plan.rollout_acts, *(fmt for _, fmt in plan.exceptions)]
    for fmt in formats:
        if fmt is not None and (fmt.scale_dtype.startswith("e8m0") or fmt.rule == "ue8m0") and not is_power_of_two(s):
            raise ValueError(
                f"{part}.s: {s:g} with {fmt.name}, whose scales are powers of two, would change nearly every code; "
                "choose a power of two (1, 2, 0.5) or a format with float scales"
            )


@dataclass(frozen=True, kw_only=True)
class UAQ(Part):
    """Update-aware quantization: one exact rescaling of the checkpoint, before training; masters stay float32."""

    s: float = 1.5
    """Weights are divided by it, gains multiplied; the authors' best of 1, 1.5 and 2."""
    tensors: Scope = "qkv"
    """qkv: attention inputs alone, as two notes on the paper say; all: whatever reads input_layernorm or
    post_attention_layernorm, gate and up too."""

    def __post_init__(self) -> None:
        if not 0 < self.s < float("inf"):
            raise ValueError(f"{type(self).__name__}.s: {self.s} is not a positive factor")

    def plan(self, rollout: Plan) -> Plan:
        check_scale(type(self).__name__, self.s, rollout)
        return Plan()

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        earlier = parts[: list(parts).index(self)]
        if fitted := [type(p).__name__ for p in earlier if isinstance(p, Compensation)]:
            raise ValueError(
                f"UAQ: {fitted[0]} before it fits adapters to weights that UAQ then changes; put UAQ first"
            )

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        check_scale(type(self).__name__, self.s, plan)
        model = site.build(site.checkpoint)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        given = {**parameters, **site.fixed}
        changed = scaled(given, self.s, self.tensors)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(changed[name])
        return model, {name: changed[name] for name in site.fixed if changed[name] is not given[name]}


@dataclass(frozen=True, kw_only=True)
class UAQLearningRate(Part):
    """The control: UAQ's effect under Adam by learning rates alone, on the checkpoint as it is (ours)."""

    s: float = 1.5
    tensors: Scope = "qkv"
    """As UAQ's."""

    def __post_init__(self) -> None:
        if not 0 < self.s < float("inf"):
            raise ValueError(f"{type(self).__name__}.s: {self.s} is not a positive factor")

    def lr_factor(self, name: str) -> float:
        role = role_of(name, self.tensors)
        return 1.0 if role is None else self.s if role == "reader" else 1.0 / self.s


@dataclass(frozen=True, kw_only=True)
class ACR(TIS):
    """TIS with one cap for weight and clip range: the upper clip bound grows where the weight is truncated."""

    sets_clip: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    losses: ClassVar[tuple[str, ...]] = ("ppo",)
    needs_updates: ClassVar[int] = 2
    """With one update per batch every ratio is 1 and no bound is reached."""
    u_max: float | None = None
    """Largest upper bound (ours): ratios of 1e5 are reported, and a bound of 1e4 clips nothing. None: no guard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.u_max is not None and self.u_max < 1:
            raise ValueError(f"ACR.u_max: {self.u_max} is below 1 (choose null or a bound above 1 + eps_high)")

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, self.level)
        c = super().correct(c, b, memory)
        return replace(c, clip_high=adaptive_clip(c.clip_high, log_ratio, self.cap, self.u_max))


METHOD = Method(
    name="qurl",
    paper="arXiv 2602.13953",
    parts=(UAQ(), ACR()),
    precisions=tuple(name for name in LOW_BIT if not name.startswith("mx")),
    mode="decoupled",
    summary="weights rescaled by 1.5 into their norms, and a clip range that follows the truncated weight",
    claim="INT8 rollouts end half a point below BF16 on AIME24 (31.25, 31.67), FlashRL at 30.29",
    reconstructed="the list of rescaled tensors (from notes) and the direction of ACR's r (notes differ)",
)
QURL_ACR = replace(
    METHOD,
    name="qurl_acr",
    parts=(ACR(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="token TIS with an upper clip bound of (1 + eps) max(1, rho / C)",
    claim="the clip range alone brings INT8 rollouts from FlashRL's 30.29 to 30.63 on AIME24",
    reconstructed="the direction of ACR's r; summaries differ",
)
QURL_LR = replace(
    METHOD,
    name="qurl_lr",
    parts=(UAQLearningRate(), ACR()),
    summary="control for qurl: learning rate times 1.5 on the matrices, 1/1.5 on the gains, no rescaling",
    claim="",
    is_control=True,
    reconstructed="the whole control is ours",
)
