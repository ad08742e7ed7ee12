"""Weights of a live vLLM model: a push takes them over, and a passport reads them back.

A push is checked whole before anything is written. It then takes one of two ways. Either the reference quantizes and
vLLM's loaders take over layer by layer (`export.py`, `push_by_reload.py`); or, for large models on the trainer's GPU,
kernels write straight into place (`push_by_kernels.py`). There one block per push, in turn, is quantized by the
reference too and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.api import Passport, Plan, TensorRecord, WeightStream, base_dtype, weight_format
from harness.engines.embedded.weights import mean_by_count
from harness.engines.vllm import experts, kv, passport, push_by_kernels, push_by_reload, settings
from harness.engines.vllm.adapters import AdapterSlot
from harness.engines.vllm.builds import Build
from harness.engines.vllm.export import Export, export
from harness.engines.vllm.memory import num_parameters
from harness.engines.vllm.shards import Shard
from harness.engines.weight_stream import Stream, check_beside, read_stream
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.kv_scales import scale_names
from harness.numerics.quantize import Quantized, code_flips

READY = "ready"
"""State of weights that may be sampled from; the others are what a refusal says."""
NOTHING = "the engine has no weights: call load_weights first"
HALF = "the last push did not end: call load_weights first"
CLOSED = "the engine is closed"
SMALL = 2**28
"""Elements up to which a model takes the reference's way and codes of the last push are kept to count flips."""


class VLLMWeights:
    """Owner of the weights of an engine, which are dummies before the first `load`."""

    def __init__(
        self, model: nn.Module, vllm_config: Any, config: DecoderConfig, plan: Plan, device: torch.device,
        adapters: AdapterSlot | None, is_direct: bool | None, shard: Shard | None = None,
    ) -> None:  # fmt: skip
        """`is_direct`: take the kernels' way where the live layout allows it (None: on a GPU and a large model).
        `shard`: the share of the model that is held here; None: all of it."""
        self.shard = shard or Shard(config=config)
        self.model, self.vllm_config, self.config, self.plan, self.device = model, vllm_config, config, plan, device
        self.adapters, self.shapes = adapters, tensor_shapes(config)
        self.held_shapes = self.shard.shapes(self.shapes)
        for module in kv.attentions(model).values():  # dummy weights reach them too
            kv.set_scales(module, dict.fromkeys(kv.ROLES, 1.0))
        self.writer: push_by_kernels.Writer | None = None
        is_large = is_direct is None and device.type == "cuda" and num_parameters(config) > SMALL
        if is_direct or (is_large and not config.num_experts):
            places = push_by_kernels.quantized_places(model, plan, self.held_shapes, self.shard)
            self.writer = None if places is None else push_by_kernels.Writer(plan, places, self.plain(), self.shard)
        self.sent: dict[str, passport.Sent] = {}
        self.sent_experts: dict[str, experts.Sent] = {}
        self.codes: dict[str, Quantized] = {}
        self.pushes, self.flips, self.saturated = 0, math.nan, 0.0
        self.state = NOTHING

    def load(self, weights: WeightStream) -> None:
        """Take over a whole stream. ValueError leaves the old weights in place; whatever else goes wrong half-way
        leaves `state` at HALF."""
        stream = read_stream(weights, self.shapes, self.plan)
        self.check_beside(stream)
        if self.writer is None:
            self.take_over(export(stream, self.plan, self.shapes, self.device), stream)
        else:
            push_by_kernels.check_scales(stream, self.writer.quantized, self.shard)
            self.state = HALF
            self.writer.write(stream)
            self.finish(self.sample(stream), stream)

    def check_beside(self, stream: Stream) -> None:
        """Raises ValueError for adapters that the plan does not have, and for scales of the cache without a place."""
        check_beside(stream, self.shapes, {} if self.adapters is None else self.adapters.wanted)

    def take_over(self, pushed: Export, stream: Stream) -> None:
        """Put exported tensors under the live model, and compare what is not quantized with the stream."""
        scales = kv.all_scales(self.model)
        self.swap(pushed.tensors)
        for layer, module in kv.attentions(self.model).items():
            kv.set_scales(module, scales[layer])
        self._compare(stream)
        self.finish(pushed, stream)

    def sample(self, stream: Stream) -> Export:
        """The reference's result for this push's block of the model."""
        own = {name: shape for name, shape in self.shapes.items() if name.startswith(self.sampled)}
        return export(stream, self.plan, own, self.device)

    @property
    def sampled(self) -> str:
        """Prefix of the names of the block whose codes this push compares with the reference's; blocks take turns."""
        return f"model.layers.{self.pushes % self.config.num_layers}."

    def finish(self, pushed: Export, stream: Stream) -> None:
        """End a push: take over the cache's scales and the adapters of the stream, and keep what the passport compares
        with."""
        self._take_scales(stream)
        if self.adapters is not None:
            self.adapters.load(stream.adapters)
        dtype = base_dtype(self.plan)
        self.sent = {name: passport.sent_of(q, dtype) for name, q in pushed.quantized.items()
                     if not settings.is_expert(name)}  # fmt: skip
        self.sent_experts = experts.sent_of(pushed, self.plan, self.config, self.device)
        self._count(pushed)
        self.pushes += 1
        self.state = READY

    def swap(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Put tensors in the checkpoint's format under the live model. Until `load` has compared what arrived, the
        weights are not ready."""
        from vllm.config import set_current_vllm_config

        self.state = HALF
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), self.device:
            push_by_reload.swap(self.model, self.vllm_config.model_config, tensors)

    def _take_scales(self, stream: Stream) -> None:
        if not stream.kv:
            return
        values = torch.stack([scale.detach().float().reshape(()) for scale in stream.kv.values()]).tolist()
        told = dict(zip(stream.kv, values, strict=True))
        for layer, module in kv.attentions(self.model).items():
            kv.set_scales(module, {role: told[name] for role, name in scale_names(layer).items() if name in told})

    def _compare(self, stream: Stream) -> None:
        """Raises RuntimeError where a tensor that is held as it is differs from what was sent."""
        held = dict(self.plain(is_asked=True))
        cuts = {name: self.shard.cut(name, stream.tensors[name].detach()) for name in held}
        sent = {name: cuts[name].to(live.device, live.dtype) for name, live in held.items()}
        differ = [(live != sent[name]).sum() for name, live in held.items()]
        for name, count in zip(held, torch.stack(differ).tolist(), strict=True):
            if count:
                raise RuntimeError(f"{name} did not reach the engine: {count} elements differ")

    def plain(self, *, is_asked: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, live tensor) of everything that is not quantized, experts left out: their kernels may hold
        them in an order of their own. `is_asked`: a bias is what its kernel adds, for the same reason (Marlin)."""
        held = {name.replace(".base_layer", ""): p.data for name, p in self.model.named_parameters()}
        fused = {part: (name.removesuffix(".base_layer"), layer, parts)
                 for name, layer, parts in push_by_reload.live_linears(self.model) for part in parts}  # fmt: skip
        for name, shape in self.held_shapes.items():
            if settings.is_quantized(self.plan, name) or settings.is_expert(name):
                continue
            module, _, leaf = name.rpartition(".")
            if module not in fused:
                yield name, held[name][: shape[0]]
                continue
            whole, layer, parts = fused[module]
            before = sum(self.held_shapes[f"{part}.{leaf}"][0] for part in parts[: parts.index(module)])
            is_bias = is_asked and leaf == "bias"
            live = passport.probe_bias(layer, self.device) if is_bias else held[f"{whole}.{leaf}"]
            yield name, live[before : before + shape[0]]

    def _count(self, pushed: Export) -> None:
        new, old = pushed.quantized, self.codes
        known = {name: code_flips(q, old[name]) for name, q in new.items() if name in old}
        shares = torch.stack([*known.values()]).tolist() if known else []
        counts = [new[name].codes.numel() for name in known]
        self.flips = mean_by_count(list(zip(counts, shares, strict=True))) if known else math.nan
        self.saturated = mean_by_count(pushed.saturated)
        self.codes = new if self.writer is None and sum(q.codes.numel() for q in new.values()) <= SMALL else {}

    def known(self) -> dict[str, passport.Sent]:
        """Expected codes and scales of each quantized tensor: the reference's result, else what the live memory
        says."""
        dtype, found = base_dtype(self.plan), dict(self.sent)
        for places in (self.writer.quantized if self.writer is not None else {}).values():
            for name, place in places.items():
                fmt = weight_format(self.plan, name)
                if name not in found and fmt is not None:
                    codes, scale = push_by_kernels.gathered(self.shard, name, place, fmt)
                    q = Quantized(codes=codes, scale=scale, zero_point=None, global_scale=None, fmt=fmt,
                                  shape=tuple(codes.shape))  # fmt: skip
                    found[name] = passport.sent_of(q, dtype)
        return found

    def records(self) -> tuple[tuple[TensorRecord, ...], dict[str, str]]:
        """(records of every tensor, input format of each linear layer), measured on what is held here; checksums of
        whole tensors. Raises RuntimeError where a format is not in force. All ranks of an engine must call."""
        dtype, acts, known = base_dtype(self.plan), self.plan.rollout_acts, self.known()
        kernels = {f"{part}.weight": passport.kernel_name(layer)
                   for _, layer, parts in push_by_reload.live_linears(self.model) for part in parts}  # fmt: skip
        whole = ((name, self.shard.gather(name, live)) for name, live in self.plain(is_asked=True))
        found = passport.plain_records(whole, kernels)
        found += [] if self.adapters is None else self.adapters.records(self.shard)
        # after what ranks gather: one that finds its share wrong must not leave the others waiting
        found += passport.weight_records(self.model, known, dtype, self.shard)
        entering = passport.input_formats(self.model, known, dtype, self.device, acts and acts.name, self.shard)
        if self.sent_experts:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(self.vllm_config):
                lines, acts_of_experts = experts.records(self.model, self.sent_experts, self.plan, self.device)
            found, entering = found + lines, entering | acts_of_experts
        return tuple(sorted(found, key=lambda record: record.name)), entering

    def realized_plan(self, build: Build, engine: str) -> Passport:
        """Passport measured on the live kernels; `engine` begins its name. RuntimeError where a format is not in
        force."""
        records, acts = self.records()
        scales = {str(layer): found for layer, found in kv.all_scales(self.model).items()}
        return Passport(
            engine=f"{engine}-{build.name}-{build.version}",
            weights=records,
            acts=acts,
            kv=kv.cache_format(self.model, build.kv),
            sampler="cached",
            state={"kv_scales": scales, **passport.engine_state(self.model)},
        )

    def sync_metrics(self) -> dict[str, float]:
        """Numbers of the last load: "code_flip_rate" since the load before, "saturated_frac"."""
        return {"code_flip_rate": self.flips, "saturated_frac": self.saturated}
