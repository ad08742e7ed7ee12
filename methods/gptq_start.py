"""GPTQ start: the fake-quantized trainer begins on GPTQ's grid, and ships the codes that it computes with.

Papers: GPTQ, arXiv 2210.17323; as the first stage of Reasoning-QAT, 2601.14888 (`methods.qat_kd`).
Claim: 3-bit students that start from rounding to nearest collapse under RL; GPTQ's start keeps more of the base.
The latents start at what GPTQ rounded, error compensation included: they give its codes bit for bit and lie spread
inside their bins, so that updates flip codes. The base's own weights would give plain rounding under GPTQ's scales, and
grid points flip only after half a step. The reference evaluation reads the latents on their grid.
Ours: learned scales, at a tenth of the learning rate; a response of the base to every calibration prompt. Left out:
tensor-level scales and microscaling, whose codes do not follow from frozen scales alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from harness.api import QUANTIZED, Fixed, Memory, Method, Part, Plan, Site, Step, WeightStream, weight_format
from harness.fitting.distill import Texts, texts_of
from harness.fitting.fake_quant import SCALE, ZERO, ScaleMode, fake_quantized, is_integer, shipped
from harness.fitting.gptq_decoder import quantize_decoder, round_decoder
from harness.foundation.seeds import generator, stable_seed
from harness.numerics.formats import Format, format_named
from methods.flashrl import TIS

SCALE_LR = 0.1
"""Factor on the learning rate of learned scales: Adam's steps are absolute, and scales are small."""


def scale_lr(name: str) -> float:
    """Factor on the learning rate of parameter `name`."""
    return SCALE_LR if name.endswith(f".{SCALE}") else 1.0


def sampled(site: Site, rounds: int, purpose: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The calibration prompts, each with `rounds` responses of the base."""
    base = site.build(site.original)
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for i in range(rounds):
        out = site.sample(base, site.calibration, stable_seed(site.seed, purpose, i))
        for prompt, ids, length in zip(site.calibration, out.token_ids, out.lengths, strict=True):
            pairs.append((prompt, tuple(map(int, ids[: int(length)]))))
    return pairs


def asymmetric(fmt: Format) -> Format:
    """The bits and groups of an integer format, with zero points. Raises ValueError for one without groups."""
    bits, _, rest = fmt.name.partition("_g")
    if not rest:
        raise ValueError(f"GPTQStart.grid=asymmetric: {fmt.name} has no groups; choose plan")
    columns = rest.removesuffix("_qat")
    return format_named(f"{bits}_g{columns}_asym{rest.removeprefix(columns)}")


@dataclass(frozen=True, kw_only=True)
class GPTQStart(Part):
    """Latents and scales of the fake-quantized trainer, whose codes are shipped as they are."""

    sets_linears: ClassVar[bool] = True
    start: Literal["gptq", "rtn"] = "gptq"
    """rtn: rounded to nearest, without calibration."""
    latent: Literal["preround", "dequant", "orig"] = "preround"
    """Latents start at GPTQ's compensated values, at the grid points, or at the base's weights."""
    scale: ScaleMode = "frozen"
    """dynamic: recomputed from the latents at every pass, which may move every code at the start."""
    grid: Literal["plan", "asymmetric"] = "plan"
    """asymmetric: the precision's bits and groups with zero points. The paper's W3G128 is
    precision.weights=int3_g128_asym."""
    act_order: Literal["none", "static"] = "none"
    """static: GPTQ rounds columns by falling curvature, in the groups they had."""
    damping: float = 0.01
    """Fraction of the mean curvature that is added to its diagonal."""
    sequential_inputs: bool = True
    """Each layer is calibrated on inputs that went through the quantized layers before it."""
    calibration: Literal["in_domain", "off_domain"] = "in_domain"
    """off_domain: random tokens at the same lengths."""
    num_sequences: int = 128
    """Calibration prompts at most, each with a response of the base."""
    ste_clip: bool = True
    """No gradient for weights whose code is clipped."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.damping < float("inf") or self.num_sequences < 1:
            own, given = "GPTQStart.damping, num_sequences", f"{self.damping}, {self.num_sequences}"
            raise ValueError(f"{own}: {given}; choose a finite one from 0 up, at least 1")

    def plan(self, rollout: Plan) -> Plan:
        fmt = rollout.rollout_weights
        if fmt is None or not is_integer(fmt):
            name = None if fmt is None else fmt.name
            raise ValueError(f"GPTQStart: weights={name} is no integer grid; choose int4, int3 or int2")
        if self.grid == "plan" or not fmt.symmetric:
            return Plan()
        return Plan(exceptions=tuple((pattern, asymmetric(fmt)) for pattern in QUANTIZED))

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        if self.start == "rtn" and self.scale != "learned":
            return
        for name, shape in (shapes or {}).items():
            fmt = weight_format(plan, name) if name.startswith("model.layers.") else None  # no head is rounded here
            group = 0 if fmt is None or fmt.tile is None else fmt.tile[1]
            if fmt is not None and group and shape[1] % group:
                what = "GPTQ" if self.start == "gptq" else "a learned scale"
                raise ValueError(
                    f"GPTQStart: {name} has {shape[1]} input channels, and {what} to {fmt.name} needs whole groups of "
                    f"{group}; choose another model or precision, or start=rtn with scale=frozen"
                )

    def prepare(self, site: Site, plan: Plan) -> tuple[nn.Module | None, dict[str, Tensor]]:
        model, fmt_of = site.build(site.checkpoint), partial(weight_format, plan)
        original = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        if self.start == "rtn":
            found = round_decoder(model, fmt_of)
        else:
            texts = self._texts(site, len(original["model.embed_tokens.weight"]))
            found = quantize_decoder(
                model, texts.ids, texts.keep(), fmt_of,
                damping=self.damping, act_order=self.act_order, sequential=self.sequential_inputs,
            )  # fmt: skip
        if fallen := sum(one.is_fallback for one in found.values()):
            warnings.warn(f"GPTQ rounded {fallen} layers to nearest: their inputs do not factorise", stacklevel=2)
        fixed: dict[str, Tensor] = {}
        for name, one in found.items():
            latents = {"preround": one.preround, "dequant": one.values, "orig": original[f"{name}.weight"]}
            with torch.no_grad():
                model.get_parameter(f"{name}.weight").copy_(latents[self.latent])
            fixed[f"{name}.{SCALE}"] = one.scale
            if one.zero_point is not None:
                fixed[f"{name}.{ZERO}"] = one.zero_point
        return model, {} if self.scale == "dynamic" else fixed

    def _texts(self, site: Site, vocabulary: int) -> Texts:
        prompts = site.calibration[: self.num_sequences]
        texts = texts_of(sampled(replace(site, calibration=prompts), 1, "gptq"))
        if self.calibration == "in_domain":
            return texts
        noise = torch.randint(vocabulary, texts.ids.shape, generator=generator("cpu", site.seed, "off domain"))
        return replace(texts, ids=noise)

    def wrap(self, model: nn.Module, plan: Plan, fixed: Fixed) -> nn.Module:
        return fake_quantized(model, plan, scale_mode=self.scale, fixed=fixed, ste_clip=self.ste_clip)

    def lr_factor(self, name: str) -> float:
        return scale_lr(name)

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        return shipped(weights, plan)


METHOD = Method(
    name="qat_no_kd", paper="arXiv 2601.14888", parts=(GPTQStart(), TIS()), precisions=("int4", "int3", "int2"),
    summary="GPTQ's start of a fake-quantized trainer, without distillation", is_control=True,
    reconstructed="TIS during RL, calibration on the base's own responses",
)  # fmt: skip
QAT_RTN = replace(
    METHOD,
    name="qat_rtn",
    parts=(GPTQStart(start="rtn", latent="orig"), TIS()),
    summary="control for qat_kd: a fake-quantized trainer from rounding to nearest, no cold start",
    reconstructed="TIS during RL",
)
