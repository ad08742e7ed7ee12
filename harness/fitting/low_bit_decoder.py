"""The forward pass of a quantized decoder with adapters, with a gradient for the adapters alone.

    y = acts(x) W_hat^T + b + scale (x A^T) B^T        W_hat, b frozen; A, B float32 and trained (RILQ, 2412.01129)

`low_bit_weights` gives the values an engine arrives at: what is quantized is the tensor in the engine's base dtype,
and merged layers share a tensor-level scale. Left out: the engine's rounding of activations and adapters to its base
dtype (float32 here), which is far below the steps of the formats that need compensation, and a quantized KV cache.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Plan, base_dtype, fused, weight_format
from harness.numerics.experts import entering
from harness.numerics.formats import Format
from harness.numerics.linear import ste
from harness.numerics.quantize import dequantize, merged_amax, quantize
from harness.numerics.rounding import CASTS

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


class LowBitLinear(nn.Module):
    """A frozen low-bit linear layer and its adapter. Gradients pass straight through the rounding of activations."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *, scale: float, acts: Format | None
    ) -> None:
        """weight [N, K] and bias [N] dequantized already, a [r, K], b [N, r]: float32, the last two are copied."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.lora_A = nn.Parameter(a.detach().to(weight.device, torch.float32, copy=True))
        self.lora_B = nn.Parameter(b.detach().to(weight.device, torch.float32, copy=True))
        self.scale, self.acts = scale, acts

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] float32 -> [..., N] float32."""
        entering = x if self.acts is None else ste(x, self.acts)
        y = F.linear(entering, self.weight, self.bias)
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


@torch.no_grad()
def low_bit_weights(weights: Mapping[str, Tensor], plan: Plan, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 values with which an engine of `plan` computes, by checkpoint name; fresh tensors.

    weights: every checkpoint tensor, float32. given: "<module>.weight_scale" and "<module>.weight_zero_point" of those
    that come with scales; other names in it are ignored. A tied head has values of its own where the plan says so.
    """
    base, values = base_dtype(plan), dict[str, Tensor]()
    if weight_format(plan, "lm_head.weight") is not None and "lm_head.weight" not in weights:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    for name, tensor in weights.items():
        fmt = weight_format(plan, name)
        if fmt is None or fmt.tile is None:
            values[name] = tensor.detach().to(base if fmt is None else CASTS[fmt.element]).to(torch.float32, copy=True)
    for fmt, names in _merged(weights, plan):
        received = [weights[name].detach().to(base) for name in names]
        amax = merged_amax(received, fmt)
        for name, w in zip(names, received, strict=True):
            scale, zero = given.get(f"{name}_scale"), given.get(f"{name}_zero_point")
            scale, zero = (None if x is None else x.to(w.device) for x in (scale, zero))
            q = quantize(w, fmt, scale=scale, zero_point=zero, tensor_amax=None if scale is not None else amax)
            values[name] = dequantize(q)
    return values


def _merged(names: Iterable[str], plan: Plan) -> Iterable[tuple[Format, list[str]]]:
    """(tiled format, the tensors that share a tensor-level scale under it)."""
    for group in fused(names):
        for fmt, run in groupby(group, key=partial(weight_format, plan)):
            if fmt is not None and fmt.tile is not None:
                yield fmt, list(run)


@torch.no_grad()
def low_bit_student(
    model: nn.Module, values: Mapping[str, Tensor], adapters: Mapping[str, Tensor], *, scale: float, acts: Format | None
) -> nn.Module:
    """A copy of `model` that computes with `values` (`low_bit_weights`); only its adapters require a gradient.

    adapters: "<module>.lora_A.weight" [r, K] and "<module>.lora_B.weight" [N, r] of every layer that has one. A head
    tied to the embedding stays tied unless `values` has one of its own.
    """
    twin = copy.deepcopy(model).requires_grad_(False)
    modules = [name.removesuffix(LORA_A) for name in adapters if name.endswith(LORA_A)]
    for name, parameter in twin.named_parameters():
        parameter.copy_(values[name])
    if "lm_head.weight" in values:
        twin.get_submodule("lm_head").register_parameter(
            "weight", nn.Parameter(values["lm_head.weight"].clone(), requires_grad=False)
        )
    for module in modules:
        parent, _, child = module.rpartition(".")
        old = twin.get_submodule(module)
        linear = LowBitLinear(
            old.get_parameter("weight").detach(), getattr(old, "bias", None), adapters[f"{module}{LORA_A}"],
            adapters[f"{module}{LORA_B}"], scale=scale, acts=acts,
        )  # fmt: skip
        setattr(twin.get_submodule(parent), child, linear)
    return twin


def adapters_of(student: nn.Module) -> dict[str, Tensor]:
    """Copies of a student's adapters: "<module>.lora_A.weight" [r, K], "<module>.lora_B.weight" [N, r], float32."""
    return {f"{name}.weight": p.detach().clone() for name, p in student.named_parameters() if p.requires_grad}


@torch.no_grad()
def input_grams(
    model: nn.Module, modules: Iterable[str], ids: Tensor, used: Tensor, rows: int = 64
) -> dict[str, Tensor]:
    """X^T X [K, K] float32 of what enters each of `modules` at the used positions, over passes of `rows` sequences. An
    expert that no used position reaches has none.

    `model` maps token ids [n, L] int64 to anything; ids [N, L] int64; used [N, L] bool.
    """
    grams: dict[str, Tensor] = {}
    mask = used

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].to(torch.float32)[entering(model, name, mask)]
        if len(x) or ".experts." not in name:
            grams[name] = x.T @ x + grams.get(name, 0.0)

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(add, name)) for name in modules]
    try:
        for part, mask in zip(ids.split(rows), used.split(rows), strict=True):  # noqa: B007 - the hooks read it
            model(part)
    finally:
        for handle in handles:
            handle.remove()
    return grams
