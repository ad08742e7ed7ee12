"""GPTQ over a decoder: block by block, and inside a block in the order of the forward pass.

    q, k, v  ->  o  ->  gate, up  ->  down        each stage with inputs recomputed through what is quantized already

Paper: 2210.17323, with the true-sequential order of its code. Memory: the hidden states of all texts, and one Hessian;
in a mixture that of every expert. An expert is calibrated on its own tokens; one without any is rounded to nearest.
Left out: embedding, head, norms and routers, which stay as they are.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.api import LINEAR
from harness.numerics.experts import entering
from harness.numerics.formats import Format
from harness.numerics.gptq import ActOrder, accumulate, gptq
from harness.numerics.quantize import dequantize, quantize

Group = tuple[str, ...]
ROWS = 64
"""Texts of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Rounded weight with its grid."""

    values: Tensor
    """float32 [N, K]: what the codes stand for."""
    preround: Tensor
    """float32 [N, K]: what was rounded; with the scales given it rounds to `values` bit for bit."""
    scale: Tensor
    """As in `quantize.Quantized`, and so is the zero point."""
    zero_point: Tensor | None
    is_fallback: bool = False
    """GPTQ was asked for, and the Hessian could not be factorised or no text reached the expert: this is rounding to
    nearest."""


def stages_of(block: nn.Module) -> list[list[Group]]:
    """Groups of a block, in the order in which they are computed; those of a stage, one for each expert, do not depend
    on each other."""
    named: list[tuple[str, nn.Module]] = list(block.named_modules())
    mlps = [name.removesuffix("gate_proj") for name, _ in named if name.endswith(".gate_proj")]
    places = (["self_attn."], ["self_attn."], mlps, mlps)
    return [[tuple(f"{at}{name}" for name in group) for at in ats] for ats, group in zip(places, LINEAR, strict=True)]


@torch.no_grad()
def round_decoder(model: nn.Module, fmt_of: Callable[[str], Format | None]) -> dict[str, Rounded]:
    """`quantize_decoder` by rounding to nearest, which needs no texts."""
    found: dict[str, Rounded] = {}
    for i, block in enumerate(cast(nn.ModuleList, model.get_submodule("model.layers"))):
        for name in (f"model.layers.{i}.{name}" for stage in stages_of(block) for group in stage for name in group):
            fmt = fmt_of(f"{name}.weight")
            if fmt is not None:
                found[name] = _nearest(model.get_parameter(f"{name}.weight"), fmt)
    return found


def _nearest(weight: Tensor, fmt: Format, *, is_fallback: bool = False) -> Rounded:
    """Round a weight to nearest, in place."""
    q, before = quantize(weight, fmt), weight.detach().clone()
    assert q.scale is not None
    weight.copy_(dequantize(q))
    return Rounded(
        values=weight.detach().clone(), preround=before, scale=q.scale, zero_point=q.zero_point,
        is_fallback=is_fallback,
    )  # fmt: skip


@torch.no_grad()
def quantize_decoder(
    model: nn.Module,
    ids: Tensor,
    keep: Tensor,
    fmt_of: Callable[[str], Format | None],
    *,
    damping: float = 0.01,
    act_order: ActOrder = "none",
    sequential: bool = True,
) -> dict[str, Rounded]:
    """Replace the weights of every block's linear layers by what GPTQ makes of them: results by module name.

    ids [N, L] int64 and keep [N, L] bool (False: padding) are the calibration texts; `fmt_of`: weight name -> format,
    None for weights that stay. damping, act_order: as in `gptq`. sequential False: all inputs are those of the
    unquantized model. Raises ValueError as `gptq`.
    """
    blocks = model.get_submodule("model.layers")
    assert isinstance(blocks, nn.ModuleList)
    device = next(model.parameters()).device
    ids, keep = ids.to(device), keep.to(device)
    keeps = keep.split(ROWS)
    inputs = _block_inputs(model, blocks[0], ids.split(ROWS))
    found: dict[str, Rounded] = {}
    for i, block in enumerate(blocks):
        outputs: list[Tensor] = []
        early: dict[str, Tensor] = {}
        stages = stages_of(block)
        if not sequential:
            early = _hessians(block, inputs, keeps, [group[0] for stage in stages for group in stage], outputs)
        for stage in stages:
            chosen = [group for group in stage if any(_format(fmt_of, i, name) is not None for name in group)]
            if not chosen:
                continue
            hessians = early or _hessians(block, inputs, keeps, [group[0] for group in chosen], [])
            for name, first in ((name, group[0]) for group in chosen for name in group):
                fmt, weight = _format(fmt_of, i, name), block.get_submodule(name).get_parameter("weight")
                if fmt is None:
                    continue
                own, h = f"model.layers.{i}.{name}", hessians.get(first)
                if h is None or (".experts." in name and not h.any()):
                    found[own] = _nearest(weight, fmt, is_fallback=True)
                    continue
                one = gptq(weight, h, fmt, damping=damping, act_order=act_order, name=own)
                found[own] = Rounded(
                    values=one.values, preround=one.preround, scale=one.scale, zero_point=one.zero_point,
                    is_fallback=one.is_fallback,
                )  # fmt: skip
                weight.copy_(one.values)
        if sequential:
            _hessians(block, inputs, keeps, [], outputs)
        inputs = [((x, *args[1:]), kwargs) for x, (args, kwargs) in zip(outputs, inputs, strict=True)]
    return found


def _format(fmt_of: Callable[[str], Format | None], layer: int, name: str) -> Format | None:
    return fmt_of(f"model.layers.{layer}.{name}.weight")


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block; the first is the hidden state."""


def _block_inputs(model: nn.Module, first: nn.Module, batches: Sequence[Tensor]) -> list[Call]:
    """Inputs of the first block, batch by batch."""
    seen: list[Call] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        for ids in batches:
            model(ids)
    finally:
        handle.remove()
    return seen


def _hessians(
    block: nn.Module, inputs: Sequence[Call], keeps: Sequence[Tensor], names: Sequence[str], outputs: list[Tensor]
) -> dict[str, Tensor]:
    """H [K, K] float32 of the inputs of the named modules, over all batches; None of an expert without tokens. Fills
    `outputs` with the block's."""
    sums: dict[str, tuple[Tensor | None, int]] = dict.fromkeys(names, (None, 0))

    def look(keep: Tensor, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        sums[name] = accumulate(*sums[name], args[0], entering(block, name, keep))

    for (args, kwargs), keep in zip(inputs, keeps, strict=True):
        handles = [block.get_submodule(name).register_forward_pre_hook(partial(look, keep, name)) for name in names]
        try:
            outputs.append(block(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
    return {name: h for name, (h, _) in sums.items() if h is not None}
