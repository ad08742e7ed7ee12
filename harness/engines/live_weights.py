"""The weights a rollout engine computes with: checkpoint tensors in, quantized, dequantized into fused matrices.

A slab is what is quantized in one call: the tensors of one role in consecutive layers that share a format. Per tensor
the result is the same as alone, because no scale reaches across tensors; where one does, a slab holds one tensor.
What is quantized is the tensor rounded to the engine's base dtype first, as an engine receives it (precision.md 8.3);
plain casts are taken from the float32 master. Left out: adapters, and kernels that read packed codes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from harness.api import MERGED, Plan, TensorRecord, WeightStream, weight_format
from harness.engines.stream import read_stream
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.formats import Format, format_named
from harness.numerics.linear import EmulatedLinear
from harness.numerics.quantize import Quantized, code_flips, dequantize, has_tensor_scale, quantize, saturated_frac
from harness.numerics.rounding import CASTS

FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "gate_up": ("gate_proj", "up_proj"),
         "down": ("down_proj",)}  # fmt: skip
"""Fused matrix -> the checkpoint's linears in it, by rows."""
SINGLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
PER_LAYER = {"input_gain": "input_layernorm.weight", "post_gain": "post_attention_layernorm.weight",
             "q_gain": "self_attn.q_norm.weight", "k_gain": "self_attn.k_norm.weight"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Tensors quantized in one call, and where their values live."""

    names: tuple[str, ...]
    """As the passport calls them."""
    sources: tuple[str, ...]
    """As the stream calls them: the head of a tied model comes from the embedding."""
    fmt: Format
    live: Tensor
    """[n, ...] view of the memory that the forward pass reads; [...] where the stack has no layer axis."""
    merged: str | None
    """Tensors that name the same group share a tensor-level scale."""


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """One block, as the forward pass wants it. Every tensor is a view of `LiveWeights.stacks`."""

    qkv: EmulatedLinear
    out: EmulatedLinear
    gate_up: EmulatedLinear
    down: EmulatedLinear
    input_gain: Tensor
    post_gain: Tensor


def base_format(plan: Plan) -> Format:
    """What the engine's tensors are by default: fp32 or fp16 where the plan's weights are that, else bf16."""
    fmt = plan.rollout_weights
    return fmt if fmt is not None and fmt.element in ("fp32", "fp16") else format_named("bf16")


class LiveWeights:
    """Owns the weights of one engine. Before the first `load` they are zero."""

    def __init__(self, config: DecoderConfig, plan: Plan, device: torch.device) -> None:
        """Raises ValueError where the plan's exceptions split a fused matrix between quantized and plain inputs."""
        self.config, self.plan, self.device = config, plan, device
        self.base = base_format(plan)
        self.eps = torch.tensor(config.rms_eps, device=device)
        self.shapes = tensor_shapes(config)
        self.stacks = self._allocate()
        self.linears = {f"{i}.{name}": self._linear(i, name) for i in range(config.num_layers) for name in FUSED}
        self.head = self._head()
        self.layers = [
            FusedLayer(**{name: self.linears[f"{i}.{name}"] for name in FUSED},
                       input_gain=self.stacks["input_gain"][i], post_gain=self.stacks["post_gain"][i])
            for i in range(config.num_layers)
        ]  # fmt: skip
        self.slabs = list(self._slabs())
        self.loaded: list[tuple[Slab, Quantized]] = []
        self.previous: list[tuple[Slab, Quantized]] = []
        self.saturated: list[tuple[int, float]] = []

    def _allocate(self) -> dict[str, Tensor]:
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parts in FUSED.items():
            of_parts = [self.shapes[f"model.layers.0.{_module(part)}.weight"] for part in parts]
            shapes[name] = (c.num_layers, sum(rows for rows, _ in of_parts), of_parts[0][1])
        if c.attention_bias:
            shapes["qkv_bias"] = shapes["qkv"][:2]
        for name, suffix in PER_LAYER.items():
            if (tensor := f"model.layers.0.{suffix}") in self.shapes:
                shapes[name] = (c.num_layers, *self.shapes[tensor])
        for name, tensor in SINGLE.items():
            if tensor in self.shapes:
                shapes[name] = self.shapes[tensor]
        stacks = {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}
        if "head" not in stacks:
            is_same = (self.plan.lm_head or self.base) == self.base
            stacks["head"] = stacks["embed"] if is_same else torch.zeros_like(stacks["embed"])
        return stacks

    def _linear(self, layer: int, name: str) -> EmulatedLinear:
        parts = [f"model.layers.{layer}.{_module(part)}.weight" for part in FUSED[name]]
        is_left = {weight_format(self.plan, part) is None for part in parts}
        if len(is_left) > 1 and self.plan.rollout_acts is not None:
            raise ValueError(f"exceptions: {', '.join(parts)} are one fused matrix with one input; all or none of them")
        acts = None if is_left == {True} else self.plan.rollout_acts
        bias = self.stacks["qkv_bias"][layer] if name == "qkv" and "qkv_bias" in self.stacks else None
        return self._emulated(self.stacks[name][layer], bias, None if acts == self.base else acts, self.base)

    def _head(self) -> EmulatedLinear:
        fmt = self.plan.lm_head
        return self._emulated(self.stacks["head"], None, None, self.base if fmt is None or fmt.tile else fmt)

    def _emulated(self, weight: Tensor, bias: Tensor | None, acts: Format | None, base: Format) -> EmulatedLinear:
        linear = EmulatedLinear(weight, bias, acts=acts, base=base)
        linear.weight, linear.bias = weight, bias  # views of the stacks, so that one copy fills all layers
        return linear

    def _slabs(self) -> Iterable[Slab]:
        c = self.config
        for name, parts in FUSED.items():
            row = 0
            for part in parts:
                rows = self.shapes[f"model.layers.0.{_module(part)}.weight"][0]
                group = next((name for members in MERGED if part in members), None)
                yield from self._runs(f"{_module(part)}.weight", self.stacks[name][:, row : row + rows], group)
                if name == "qkv" and c.attention_bias:
                    yield from self._runs(f"{_module(part)}.bias", self.stacks["qkv_bias"][:, row : row + rows], None)
                row += rows
        for name, suffix in PER_LAYER.items():
            if name in self.stacks:
                yield from self._runs(suffix, self.stacks[name], None)
        for name, tensor in SINGLE.items():
            source = "model.embed_tokens.weight" if tensor not in self.shapes else tensor
            if name == "head" and self.stacks["head"] is self.stacks["embed"]:
                continue
            fmt = weight_format(self.plan, tensor) or self.base
            yield Slab(names=(tensor,), sources=(source,), fmt=fmt, live=self.stacks[name], merged=None)

    def _runs(self, suffix: str, stack: Tensor, group: str | None) -> Iterable[Slab]:
        """Slabs of consecutive layers with one format; single layers where a scale would reach across."""
        names = [f"model.layers.{i}.{suffix}" for i in range(self.config.num_layers)]
        formats = [weight_format(self.plan, name) or self.base for name in names]
        for fmt, run in groupby(range(len(names)), key=formats.__getitem__):
            indices = list(run)
            chunks = [indices] if _is_stackable(fmt) else [[i] for i in indices]
            for chunk in chunks:
                chosen = tuple(names[i] for i in chunk)
                shared = f"{chunk[0]}.{group}.{fmt.name}" if group and has_tensor_scale(fmt) else None
                live = stack[chunk[0] : chunk[-1] + 1]
                live = live if _is_stackable(fmt) else live[0]
                yield Slab(names=chosen, sources=chosen, fmt=fmt, live=live, merged=shared)

    @torch.no_grad()
    def load(self, weights: WeightStream) -> dict[str, Tensor]:
        """Quantize a whole stream, then write it. Returns the KV scales it held, by name.

        Raises ValueError for missing, unexpected, repeated or misshapen tensors; the old weights then stay.
        """
        stream = read_stream(weights, self.shapes, has_kv=self.plan.rollout_kv is not None)
        shared = self._shared_amax(stream.tensors)
        fresh: list[tuple[Slab, Quantized]] = []
        saturated: list[tuple[int, float]] = []
        for slab in self.slabs:
            w = self._source(stream.tensors, slab)
            scale, zero = (_given(given, slab) for given in (stream.scales, stream.zeros))
            q = quantize(w, slab.fmt, scale=scale, zero_point=zero, tensor_amax=shared.get(slab.merged or ""))
            if scale is not None:
                saturated.append((w.numel(), saturated_frac(w, q)))
            fresh.append((slab, q))
        for slab, q in fresh:
            slab.live.copy_(dequantize(q))
        self.previous, self.loaded, self.saturated = self.loaded, fresh, saturated
        return stream.kv

    def _source(self, tensors: Mapping[str, Tensor], slab: Slab) -> Tensor:
        """What the slab quantizes; never memory of the stream, which belongs to a trainer that goes on updating it."""
        some = [tensors[name] for name in slab.sources]
        w = torch.stack(some) if slab.live.ndim > some[0].ndim else some[0].clone()
        return w.to(self.device, torch.float32 if slab.fmt.tile is None else CASTS[self.base.element])

    def _shared_amax(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Largest magnitude per group of merged tensors."""
        found: dict[str, Tensor] = {}
        for slab in self.slabs:
            if slab.merged is not None:
                amax = self._source(tensors, slab).abs().amax().to(torch.float32)
                found[slab.merged] = torch.maximum(found[slab.merged], amax) if slab.merged in found else amax
        return found

    def metrics(self) -> dict[str, float]:
        """Of the last load: "code_flip_rate" since the load before, over the linear layers (0 at the first), and
        "saturated_frac" of the tensors that came with a scale (0 where none did)."""
        before = {slab.names: q for slab, q in self.previous}
        flips = [
            (q.codes.numel(), code_flips(q, before[slab.names]))
            for slab, q in self.loaded
            if slab.names in before and slab.names[0].endswith("_proj.weight")
        ]
        return {"code_flip_rate": _mean(flips), "saturated_frac": _mean(self.saturated)}

    @torch.no_grad()
    def records(self) -> tuple[TensorRecord, ...]:
        """What every live tensor is. Raises RuntimeError where the memory that the forward pass reads is not, bit for
        bit, what the codes and scales of the last load stand for."""
        for key, linear in self.linears.items():
            layer, name = key.split(".")
            if linear.weight.data_ptr() != self.stacks[name][int(layer)].data_ptr():
                raise RuntimeError(f"layer {layer}: the live {name} matrix was replaced after the load")
        found: list[TensorRecord] = []
        for slab, q in self.loaded:
            if not torch.equal(dequantize(q).view(torch.int32), slab.live.view(torch.int32)):
                raise RuntimeError(f"{slab.names[0]} is not the {slab.fmt.name} tensor that was loaded")
            found += slab_records(slab, q)
        return tuple(sorted(found, key=lambda record: record.name))


def slab_records(slab: Slab, q: Quantized) -> list[TensorRecord]:
    """One passport line per tensor of a slab."""
    many = len(slab.names)
    parts = [part.cpu() for part in (q.codes, q.scale, q.zero_point, q.global_scale) if part is not None]
    stored = [part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts]
    records: list[TensorRecord] = []
    for i, name in enumerate(slab.names):
        crc = 0
        for part in stored:
            size = len(part) // many
            crc = zlib.crc32(part[i * size : (i + 1) * size], crc)
        shape = None if q.scale is None else tuple(q.scale.shape)
        if shape is not None and q.codes.ndim > 2:
            shape = shape[1:]
        dtype = str(q.codes.dtype).removeprefix("torch.")
        records.append(TensorRecord(name=name, format=slab.fmt.name, dtype=dtype, scale_shape=shape, hash=f"{crc:08x}"))
    return records


def _is_stackable(fmt: Format) -> bool:
    """True where quantizing a stack of tensors equals quantizing each: no scale reaches across tensors."""
    return fmt.tile is None or not (fmt.tile == (0, 0) or fmt.scale_dtype == "e4m3" or fmt.element == "nf4")


def _given(given: Mapping[str, Tensor], slab: Slab) -> Tensor | None:
    """The stream's scales (or zero points) of a slab, or None. Raises ValueError where only some tensors have one."""
    some = [given[name] for name in slab.names if name in given]
    if not some:
        return None
    if len(some) < len(slab.names):
        lacking = next(name for name in slab.names if name not in given)
        raise ValueError(f"{lacking} comes without a scale, other layers with one")
    return torch.stack(some) if len(slab.names) > 1 or slab.live.ndim > 2 else some[0]


def _mean(pairs: list[tuple[int, float]]) -> float:
    """Mean of values by their counts; 0 where there is none."""
    total = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / total if total else 0.0


def _module(part: str) -> str:
    return f"self_attn.{part}" if part in FUSED["qkv"] + FUSED["out"] else f"mlp.{part}"
