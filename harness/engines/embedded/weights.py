"""The weights a rollout engine computes with: checkpoint tensors in, quantized, dequantized into fused matrices.

What is quantized is the tensor rounded to the engine's base dtype first, as an engine receives it (precision.md 8.3);
plain casts are taken from the float32 master. Every expert of a mixture is a pair of fused matrices of its own; routers
stay in the base dtype, as vLLM keeps them. Left out: kernels that read packed codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from operator import not_

import torch
from torch import Tensor

from harness.api import LINEAR, Plan, TensorRecord, WeightStream, base_dtype, weight_format
from harness.engines.embedded.adapters import LiveAdapters
from harness.engines.embedded.residual import ResidualChannels
from harness.engines.embedded.slabs import Slab, cut, fill, gather, given_scales, records
from harness.engines.weight_stream import check_beside, check_patterns, read_stream
from harness.models.decoder import ROUTER, DecoderConfig, tensor_shapes
from harness.numerics.formats import Format, at_rollout, format_named
from harness.numerics.linear import EmulatedLinear
from harness.numerics.quantize import Quantized, code_flips, dequantize, quantize, saturated_frac
from harness.numerics.rounding import CASTS, cast_name

FUSED = dict(zip(("qkv", "out", "gate_up", "down"), LINEAR, strict=True))
"""Fused matrix -> the checkpoint's linears in it, by rows."""
ATTENTION = ("qkv", "out")
"""Those of attention; the others are of an MLP, or of every expert."""
SINGLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
PER_LAYER = {"input_gain": "input_layernorm.weight", "post_gain": "post_attention_layernorm.weight",
             "q_gain": "self_attn.q_norm.weight", "k_gain": "self_attn.k_norm.weight",
             "router": f"{ROUTER}.weight"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """Home of one fused matrix."""

    stack: str
    index: int
    """Its number in the stack."""
    modules: tuple[str, ...]
    """The checkpoint modules in it, by rows."""


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """Weights of one block as the forward pass reads them. Every tensor is a view of `LiveWeights.stacks`."""

    qkv: EmulatedLinear
    out: EmulatedLinear
    mlps: tuple[tuple[EmulatedLinear, EmulatedLinear], ...]
    """(gate_up, down) of the MLP, or of every expert."""
    router: EmulatedLinear | None
    """None in a dense model."""
    input_gain: Tensor
    """[d] float32, and so is `post_gain`: of the norms before attention and before the MLP."""
    post_gain: Tensor


class LiveWeights:
    """Owns the weights of one engine. Before the first `load` they are zero."""

    def __init__(self, config: DecoderConfig, plan: Plan, device: torch.device) -> None:
        """Raises ValueError where the plan's exceptions split a fused matrix between quantized and plain inputs, match
        no tensor or quantize a router, for a format of inputs that no layer would get, and where it wants a second pass
        over inputs that are not quantized."""
        self.config, self.plan, self.device = config, plan, device
        self.base = format_named(cast_name(base_dtype(plan)))
        self.eps = torch.tensor(config.rms_eps, device=device)
        self.shapes = tensor_shapes(config)
        check_patterns(plan, self.shapes)
        self.places = self._find_places()
        self.stacks = self._allocate()
        self.linears = {key: self._linear(place) for key, place in self.places.items()}
        acts = plan.rollout_acts
        if acts is not None and acts != self.base and all(linear.acts is None for linear in self.linears.values()):
            raise ValueError(
                f"rollout_acts={acts.name}: no linear layer has a rollout format, so no input would get this one; "
                "choose precision.weights=bf16 for quantized inputs beside plain weights"
            )
        self.head = self._head()
        self.layers = [
            FusedLayer(**{name: self.linears[f"{i}.{name}"] for name in ATTENTION}, router=self._router(i),
                       mlps=tuple((self.linears[f"{key}.gate_up"], self.linears[f"{key}.down"])
                                  for key in self._mlp_keys(i)),
                       input_gain=self.stacks["input_gain"][i], post_gain=self.stacks["post_gain"][i])
            for i in range(config.num_layers)
        ]  # fmt: skip
        self.slabs = list(self._slabs())
        self.adapters = self._adapters()
        alpha = 1.0 if plan.residual_alpha is None else plan.residual_alpha
        self.residual = None if plan.residual is None else ResidualChannels(plan.residual, alpha, self.linears)
        self.is_loaded = False
        self.loaded: list[tuple[Slab, Quantized]] = []
        self.previous: list[tuple[Slab, Quantized]] = []
        self.saturated: list[tuple[int, float]] = []

    def _mlp_keys(self, layer: int) -> list[str]:
        """Beginnings of the keys of a layer's MLPs: its number, and in a mixture that of the expert."""
        count = self.config.num_experts
        return [f"{layer}.{expert}" for expert in range(count)] if count else [str(layer)]

    def _find_places(self) -> dict[str, Place]:
        """Key of a fused matrix -> its place; matrices of one stack are neighbours by their number."""
        places: dict[str, Place] = {}
        for name, parts in FUSED.items():
            prefixes: dict[str, str] = {}
            for i in range(self.config.num_layers):
                if name in ATTENTION:
                    prefixes[str(i)] = f"model.layers.{i}.self_attn."
                else:
                    own = [f"model.layers.{i}.{prefix}" for prefix, _ in self.config.mlps]
                    prefixes |= dict(zip(self._mlp_keys(i), own, strict=True))
            for index, (key, prefix) in enumerate(prefixes.items()):
                modules = tuple(f"{prefix}{part}" for part in parts)
                places[f"{key}.{name}"] = Place(stack=name, index=index, modules=modules)
        return places

    def _allocate(self) -> dict[str, Tensor]:
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {}
        for name in FUSED:
            own = [place for place in self.places.values() if place.stack == name]
            of_parts = [self.shapes[f"{module}.weight"] for module in own[0].modules]
            shapes[name] = (len(own), sum(rows for rows, _ in of_parts), of_parts[0][1])
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
            is_same = self._head_format() == self.base
            stacks["head"] = stacks["embed"] if is_same else torch.zeros_like(stacks["embed"])
        return stacks

    def _linear(self, place: Place) -> EmulatedLinear:
        parts = [f"{module}.weight" for module in place.modules]
        is_left = {weight_format(self.plan, part) is None for part in parts}
        if len(is_left) > 1 and self.plan.rollout_acts is not None:
            raise ValueError(f"exceptions: {', '.join(parts)} are one fused matrix with one input; all or none of them")
        acts = None if is_left == {True} else self.plan.rollout_acts
        has_bias = place.stack == "qkv" and "qkv_bias" in self.stacks
        bias = self.stacks["qkv_bias"][place.index] if has_bias else None
        weight = self.stacks[place.stack][place.index]
        return self._emulated(weight, bias, None if acts == self.base else acts, self.base)

    def _router(self, layer: int) -> EmulatedLinear | None:
        if self.config.num_experts == 0:
            return None
        name = f"model.layers.{layer}.{ROUTER}.weight"
        fmt = weight_format(self.plan, name) or self.base
        if fmt.tile is not None:
            raise ValueError(f"exceptions: {name} as {fmt.name}; routers are not quantized; valid: bf16, fp16, fp32")
        return self._emulated(self.stacks["router"][layer], None, None, fmt)

    def _adapters(self) -> LiveAdapters | None:
        """The plan's adapters at this site, bound to the linears they sit beside."""
        adapters = at_rollout(self.plan.adapters)
        if adapters is None:
            return None
        live = LiveAdapters(adapters, self._parts(), self.shapes, self.base, self.device)
        for key, (a, b) in live.pairs.items():
            self.linears[key].adapter_a, self.linears[key].adapter_b = a, b
        return live

    def _parts(self) -> dict[str, tuple[str, ...]]:
        """Key of a linear -> the checkpoint modules in it, by rows."""
        return {key: place.modules for key, place in self.places.items()}

    def _head_format(self) -> Format:
        return weight_format(self.plan, SINGLE["head"]) or self.base

    def _head(self) -> EmulatedLinear:
        fmt = self._head_format()
        return self._emulated(self.stacks["head"], None, None, self.base if fmt.tile else fmt)

    def _emulated(self, weight: Tensor, bias: Tensor | None, acts: Format | None, base: Format) -> EmulatedLinear:
        linear = EmulatedLinear(weight, bias, acts=acts, base=base)
        linear.weight, linear.bias = weight, bias  # views of the stacks, so that one copy fills all layers
        return linear

    def _slabs(self) -> Iterator[Slab]:
        layers = range(self.config.num_layers)
        stacked: dict[str, list[list[str]]] = {}
        for place in self.places.values():
            stacked.setdefault(place.stack, []).append([f"{module}.weight" for module in place.modules])
        stacked["qkv_bias"] = [[f"model.layers.{i}.self_attn.{part}.bias" for part in FUSED["qkv"]] for i in layers]
        stacked |= {name: [[f"model.layers.{i}.{suffix}"] for i in layers] for name, suffix in PER_LAYER.items()}
        for stack, names in stacked.items():
            if stack in self.stacks:
                formats = {name: weight_format(self.plan, name) or self.base for layer in names for name in layer}
                yield from cut(self.stacks[stack], names, [self.shapes[name][0] for name in names[0]], formats)
        for stack, name in SINGLE.items():
            if stack == "head" and self.stacks["head"] is self.stacks["embed"]:
                continue
            yield Slab(
                names=((name,),), sources=(name if name in self.shapes else SINGLE["embed"],),
                rows=(len(self.stacks[stack]),), fmt=weight_format(self.plan, name) or self.base,
                live=self.stacks[stack], is_stacked=False,
            )  # fmt: skip

    @torch.no_grad()
    def load(self, weights: WeightStream, *, keeps_codes: bool = True) -> dict[str, Tensor]:
        """Quantize a whole stream, then write it. Returns the KV scales it held, by name.

        Codes are kept for `records` and `metrics`, in float32 as large as the weights themselves. Without them plain
        casts are written tensor by tensor, so that a load takes no memory of its own; quantized weights need theirs.
        Raises ValueError for missing, unexpected, repeated or misshapen tensors; the old weights then stay.
        """
        stream = read_stream(weights, self.shapes, self.plan)
        check_beside(stream, self.shapes, {} if self.adapters is None else self.adapters.wanted)
        at_once = [not keeps_codes and slab.fmt.tile is None for slab in self.slabs]
        fresh: list[tuple[Slab, Quantized]] = []
        saturated: list[tuple[int, float]] = []
        for slab in compress(self.slabs, map(not_, at_once)):
            received = torch.float32 if slab.fmt.tile is None else CASTS[self.base.element]
            w = gather(stream.tensors, slab, received)
            scale, zero = given_scales(stream.scales, slab), given_scales(stream.zeros, slab)
            q = quantize(w, slab.fmt, scale=scale, zero_point=zero)
            if scale is not None:
                saturated.append((w.numel(), saturated_frac(w, q)))
            fresh.append((slab, q))
        for slab, q in fresh:
            slab.live.copy_(dequantize(q))
        for slab in compress(self.slabs, at_once):
            fill(slab, stream.tensors)
        if self.adapters is not None:
            self.adapters.load(stream.adapters)
        self.is_loaded, self.saturated = True, saturated
        self.previous, self.loaded = (self.loaded, fresh) if keeps_codes else ([], [])
        return stream.kv

    def metrics(self) -> dict[str, float]:
        """Numbers of the last load: "code_flip_rate" since the load before, over the linear layers (NaN at the first),
        and "saturated_frac" of the tensors that came with a scale (0 where none did)."""
        before = {slab.names: q for slab, q in self.previous}
        flips = [
            (q.codes.numel(), float(code_flips(q, before[slab.names])))
            for slab, q in self.loaded
            if slab.names in before and slab.sources[0].endswith("_proj.weight")
        ]
        flip_rate = mean_by_count(flips) if flips else math.nan
        return {"code_flip_rate": flip_rate, "saturated_frac": mean_by_count(self.saturated)}

    def acts(self) -> dict[str, str]:
        """Formats of the inputs of each linear layer, by the weight's name: read from the live modules."""
        found: dict[str, str] = {}
        for key, linear in self.linears.items():
            entering = linear.acts or linear.base
            for module in self.places[key].modules:
                found[f"{module}.weight"] = entering.name if entering else "fp32"
        return found

    @torch.no_grad()
    def records(self) -> tuple[TensorRecord, ...]:
        """Records of every live tensor. Raises RuntimeError where the memory that the forward pass reads is not, bit
        for bit, what the codes and scales of the last load stand for, and where no codes were kept."""
        if not self.loaded:
            raise RuntimeError("no codes were kept of these weights")
        for key, linear in self.linears.items():
            place = self.places[key]
            if linear.weight.data_ptr() != self.stacks[place.stack][place.index].data_ptr():
                layer, what = key.partition(".")[0], place.stack
                raise RuntimeError(f"layer {layer}: the live {what} matrix was replaced after the load")
        found: list[TensorRecord] = []
        for slab, q in self.loaded:
            if not torch.equal(dequantize(q).view(torch.int32), slab.live.view(torch.int32)):
                raise RuntimeError(f"{slab.sources[0]} is not the {slab.fmt.name} tensor that was loaded")
            found += records(slab, q)
        found += [] if self.adapters is None else self.adapters.records()
        found += [] if self.residual is None else self.residual.records(self._parts())
        return tuple(sorted(found, key=lambda record: record.name))


def mean_by_count(pairs: list[tuple[int, float]]) -> float:
    """Mean of values by their counts; 0 where there is none."""
    total = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / total if total else 0.0
