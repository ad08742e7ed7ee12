"""Mixtures of experts in a live vLLM model: what a push must bring them, and what their kernels answer.

vLLM fuses the experts of a layer into two tensors, gate with up and down, whose layout is each kernel's own. So experts
are asked, as linear layers are (`passport.py`): each alone, with gate 1, answers a few fixed inputs, and the sender
keeps what the weights that it sent give for them, once for every format that the inputs may have:

    y = W_down q(h),   h = silu(W_gate q(x)) * (W_up q(x)),   q rounds to that format

The format of the nearest answer is the one in force, and one that is not near enough means other weights. Routers are
plain linear layers. Left out: adapters, several GPUs, and pushes by kernels (`push_by_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Plan, TensorRecord, base_dtype
from harness.engines.vllm.export import Export
from harness.engines.vllm.passport import ACTS_TRIED, as_held, hashes_of
from harness.engines.vllm.push_by_reload import live_experts
from harness.engines.vllm.settings import is_expert
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.formats import format_named
from harness.numerics.quantize import Quantized, dequantize, fake_quantize
from harness.numerics.rounding import cast_name

PARTS = ("gate_proj", "up_proj", "down_proj")
NUM_ROWS = 16
"""Inputs that every expert answers."""
MOST_ROWS = 512
"""Rows that a kernel gets at once: fewer than in any forward pass that it made room for."""
TOLERANCE = {16: 0.01, 8: 0.03}
"""Largest gap of an expert's answers, as a share of their norm, by the bits of its inputs. Rounding of sums to 16 bits
makes 0.003; an 8-bit kernel may round some of its inner inputs to the neighbouring code."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Passport line of one tensor, to be shown if its expert answers right."""

    format: str
    dtype: str
    scale_shape: tuple[int, ...] | None
    parts: tuple[Tensor, ...]
    """Codes and scales, or the tensor itself: what is hashed."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The sender's memory of one layer of experts."""

    lines: dict[str, Line]
    """By checkpoint name."""
    formats: tuple[str, ...]
    """Those that the inputs may have, the planned one first."""
    answers: Tensor
    """[F, E, NUM_ROWS, d] float32, by format and expert."""


def sent_of(pushed: Export, plan: Plan, config: DecoderConfig, device: torch.device) -> dict[str, Sent]:
    """Name of a layer's experts -> the memory of what a push sends to them. Empty for a dense model."""
    plain = {name: tensor for name, tensor in pushed.tensors if is_expert(name) and name.endswith(".weight")}
    names = [name for name in tensor_shapes(config) if is_expert(name)]
    found: dict[str, Sent] = {}
    for layer in dict.fromkeys(name.partition(".experts.")[0] + ".experts" for name in names):
        lines: dict[str, Line] = {}
        answers: list[Tensor] = []
        formats: tuple[str, ...] = ()
        for expert in range(config.num_experts):
            weights: list[Tensor] = []
            for part in PARTS:
                name = f"{layer}.{expert}.{part}.weight"
                lines[name], weight = _line(pushed.quantized.get(name), plain.get(name), plan, device)
                weights.append(weight)
            formats, found_answers = _answers(weights, plan, device, is_coded=name in pushed.quantized)
            answers.append(found_answers)
        found[layer] = Sent(lines=lines, formats=formats, answers=torch.stack(answers, 1))
    return found


def _line(q: Quantized | None, plain: Tensor | None, plan: Plan, device: torch.device) -> tuple[Line, Tensor]:
    """(line of one tensor, what it stands for [N, K] float32)."""
    dtype = base_dtype(plan)
    if q is None:
        assert plain is not None
        held = plain.detach().to(device, dtype, copy=True)
        return Line(format=cast_name(dtype), dtype=_dtype_name(dtype), scale_shape=None, parts=(held,)), held.float()
    parts = tuple(part for part in (q.codes, q.scale, q.zero_point, q.global_scale) if part is not None)
    line = Line(format=q.fmt.name, dtype=_dtype_name(q.codes.dtype), parts=parts,
                scale_shape=None if q.scale is None else tuple(q.scale.shape))  # fmt: skip
    return line, dequantize(as_held(q, dtype)).float()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _answers(
    weights: Sequence[Tensor], plan: Plan, device: torch.device, *, is_coded: bool
) -> tuple[tuple[str, ...], Tensor]:
    """(formats that the inputs of an expert may have, its answers to `inputs` under each, [F, NUM_ROWS, d] float32)."""
    gate, up, down = weights
    dtype = base_dtype(plan)
    base = cast_name(dtype)
    planned = plan.rollout_acts.name if is_coded and plan.rollout_acts is not None else base
    formats = {name: format_named(name) for name in (planned, base, *(ACTS_TRIED if is_coded else ()))}
    widths = gate.shape[1], down.shape[1]
    fitting = {name: fmt for name, fmt in formats.items()
               if fmt.tile is None or all(width % max(fmt.tile[1], 1) == 0 for width in widths)}  # fmt: skip
    x = inputs(gate.shape[1], dtype, device).float()
    found: list[Tensor] = []
    for fmt in fitting.values():
        entering = fake_quantize(x, fmt)
        opened, risen = ((entering @ w.T).to(dtype).float() for w in (gate, up))
        inner = (F.silu(opened) * risen).to(dtype).float()
        found.append(fake_quantize(inner, fmt) @ down.T)
    return tuple(fitting), torch.stack(found)


def inputs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Inputs that every expert is asked, [NUM_ROWS, width], always the same: magnitudes spread over some octaves."""
    draws = torch.Generator("cpu").manual_seed(width)
    x = torch.randn(NUM_ROWS, width, generator=draws) * torch.exp(torch.randn(NUM_ROWS, width, generator=draws))
    return x.to(device, dtype)


def ask(layer: Any, x: Tensor) -> Tensor:
    """Every expert's own answer to x [R, d]: [E, R, d] float32, by the layer's kernel."""
    count, method, chosen = layer.local_num_experts, layer.quant_method, int(layer.top_k)
    rows = x.repeat(count, 1)
    first = torch.arange(count, device=x.device).repeat_interleave(len(x))[:, None]
    ids = (first + torch.arange(chosen, device=x.device)) % count  # the others of a token have gate 0
    answered: list[Tensor] = []
    with torch.inference_mode():
        for own, experts in zip(rows.split(MOST_ROWS), ids.split(MOST_ROWS), strict=True):
            if method.is_monolithic:
                logits = torch.full((len(own), count), -1e4, dtype=x.dtype, device=x.device)
                answered.append(method.apply_monolithic(layer, own.clone(), logits.scatter(1, experts[:, :1], 0.0)))
                continue
            gates = torch.zeros(len(own), chosen, device=x.device)
            gates[:, 0] = 1.0
            experts = experts.to(getattr(method, "topk_indices_dtype", None) or torch.int32)
            answered.append(method.apply(layer, own.clone(), gates, experts.contiguous(), None, None))
    return torch.cat(answered).float().view(count, len(x), -1)


def kernel_name(layer: Any) -> str:
    """The class that multiplies, as vLLM chose it."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    return type(layer.quant_method if kernel is None else kernel.fused_experts).__name__


def gaps_of(layer: Any, told: Sent, plan: Plan, device: torch.device) -> Tensor:
    """[F, E] float32: how far the answers of a live layer's experts lie from those told under each format, as a share
    of their norm."""
    answered = ask(layer, inputs(told.answers.shape[-1], base_dtype(plan), device))
    return (told.answers - answered).flatten(2).norm(dim=2) / told.answers.flatten(2).norm(dim=2)


def records(
    model: nn.Module, sent: Mapping[str, Sent], plan: Plan, device: torch.device
) -> tuple[list[TensorRecord], dict[str, str]]:
    """(a line for every tensor of every expert, format of what enters it by the weight's name), from what the kernels
    answer. Raises RuntimeError naming the first expert that does not compute with what was sent."""
    lines: dict[str, tuple[Line, str]] = {}
    entering: dict[str, str] = {}
    for name, layer in live_experts(model):
        told = sent[name]
        gaps = gaps_of(layer, told, plan, device).cpu()
        nearest = gaps.nan_to_num(torch.inf).argmin(0).tolist()
        for expert, chosen in enumerate(nearest):
            acts, gap = str(told.formats[int(chosen)]), float(gaps[chosen, expert])
            own = [f"{name}.{expert}.{part}.weight" for part in PARTS]
            if not gap <= tolerance(acts):
                raise RuntimeError(
                    f"{own[0]} and its up and down are not the {told.lines[own[0]].format} tensors that were loaded: "
                    f"{kernel_name(layer)} answers {gap:.3g} of the norm away, at inputs in {acts}"
                )
            entering |= dict.fromkeys(own, acts)
            lines |= {tensor: (told.lines[tensor], kernel_name(layer)) for tensor in own}
    hashes = hashes_of([line.parts for line, _ in lines.values()])
    found = [
        TensorRecord(name=name, format=line.format, dtype=line.dtype, scale_shape=line.scale_shape, hash=code,
                     kernel=kernel)
        for (name, (line, kernel)), code in zip(lines.items(), hashes, strict=True)
    ]  # fmt: skip
    return found, entering


def tolerance(acts: str) -> float:
    """Largest relative gap of an expert's answers to inputs of this format."""
    return TOLERANCE[16 if format_named(acts).tile is None else 8]
