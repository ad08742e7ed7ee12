"""Push that comes in pieces whose memory is lent, as verl's buckets are: at most one block of the model is held.

    pieces -> waiting: copies of one block's tensors (or of the embedding, the last norm, the head), in stream order;
              what is not quantized as the engine will hold it, which is half of a float32 embedding
           -> when a tensor of another one arrives: checked as a whole, then quantized, or written by kernels
    end    -> nothing missing -> what was quantized is swapped in, as by `VLLMWeights.load`

What `load` does with whole streams that stay where they are, at the price of one promise: where kernels write (large
models), a stream that turns out wrong has overwritten what came before, and the engine is not ready.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.api import base_dtype
from harness.engines.vllm.export import Export, export
from harness.engines.vllm.settings import is_expert, is_quantized
from harness.engines.vllm.weights import HALF, VLLMWeights
from harness.engines.weight_stream import Stream, read_stream
from harness.foundation.did_you_mean import listed


def unit_of(name: str) -> str:
    """Name of the unit with which a tensor is taken over: its decoder block, elsewhere its module."""
    parts = name.split(".")
    return ".".join(parts[:3] if name.startswith("model.layers.") else parts[:-1])


class Arrival:
    """Owns one push until its end. Adapters and scales of the cache, which are small, wait for it."""

    def __init__(self, weights: VLLMWeights) -> None:
        self.weights = weights
        self.waiting: list[tuple[str, Tensor]] = []
        self.num_owned = 0
        self.rest = Stream(tensors={}, scales={}, zeros={}, adapters={}, kv={})
        self.pushed = Export(tensors=[], quantized={}, saturated=[])
        self.units: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in weights.shapes.items():
            self.units.setdefault(unit_of(name), {})[name] = shape
        self.plain = {name: live.dtype for name, live in weights.plain()}
        base = base_dtype(weights.plan)
        self.plain |= {
            name: base for name in weights.shapes if is_expert(name) and not is_quantized(weights.plan, name)
        }

    @torch.no_grad()
    def take(self, pieces: Iterable[tuple[str, Tensor]]) -> None:
        """Take the next tensors of the stream; their memory may be used again afterwards.

        Raises ValueError for what the model does not have, lacks, has in another shape, or gets in two parts.
        """
        for name, tensor in pieces:
            if self.waiting and unit_of(name) != unit_of(self.waiting[0][0]):
                self._settle()
            self.waiting.append((name, tensor))
        for i in range(self.num_owned, len(self.waiting)):
            name, tensor = self.waiting[i]
            self.waiting[i] = name, self._copied(name, tensor)
        self.num_owned = len(self.waiting)

    @torch.no_grad()
    def end(self) -> None:
        """End the push. Raises ValueError where something is missing, and for adapters or scales of the cache that the
        model does not have."""
        if self.waiting:
            self._settle()
        if missing := [name for own in self.units.values() for name in own]:
            raise ValueError(f"weight stream: missing {listed(missing)}; unexpected none")
        self.weights.check_beside(self.rest)
        if self.weights.writer is None:
            self.weights.take_over(self.pushed, self.rest)
        else:
            self.weights.finish(self.pushed, self.rest)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy, in the dtype of the engine where the tensor is held as it is."""
        return tensor.to(self.plain.get(name, tensor.dtype), copy=True)

    def _settle(self) -> None:
        """Take over what is waiting. A unit without weights, or one that is there already, may bring adapters and
        scales of the cache."""
        weights, unit = self.weights, unit_of(self.waiting[0][0])
        own = self.units.pop(unit, {})
        part = read_stream(iter(self.waiting), own, weights.plan)
        self.waiting, self.num_owned = [], 0
        for small in (part.scales, part.zeros, part.adapters, part.kv):
            small.update({name: tensor.clone() for name, tensor in small.items()})
        self.rest.adapters.update(part.adapters)
        self.rest.kv.update(part.kv)
        if not own:
            return
        if weights.writer is None:
            self._keep(part, own)
            return
        weights.state = HALF
        weights.writer.write_part(part)
        if f"{unit}." == weights.sampled:
            self.pushed = weights.sample(part)

    def _keep(self, part: Stream, order: dict[str, tuple[int, ...]]) -> None:
        """Keep a unit's codes and scales, and what is not quantized as the engine will hold it."""
        held = {name: self._copied(name, tensor).to(self.weights.device)
                for name, tensor in part.tensors.items() if name in self.plain}  # fmt: skip
        self.rest.tensors.update(held)
        part.tensors.update(held)
        found = export(part, self.weights.plan, order, self.weights.device)
        self.pushed.tensors.extend(found.tensors)
        self.pushed.quantized.update(found.quantized)
        self.pushed.saturated.extend(found.saturated)
