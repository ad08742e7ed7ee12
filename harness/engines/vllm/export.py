"""Export of a push: a checked stream of weights -> tensors in the checkpoint format that vLLM was started for.

Quantized with the trainer's quantizer, from the tensor rounded to the engine's dtype, as the embedded engine does: both
engines and every method share codes. Parts of one fused matrix share a tensor-level scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.api import Plan, base_dtype, fused, weight_format
from harness.engines.vllm.settings import is_quantized
from harness.engines.weight_stream import Stream, check_one_scale
from harness.numerics.packing import pack
from harness.numerics.quantize import Quantized, has_tensor_scale, merged_amax, quantize, saturated_frac


@dataclass(frozen=True, kw_only=True)
class Export:
    """Tensors of a push, and what is remembered of them."""

    tensors: list[tuple[str, Tensor]]
    """Tensors by checkpoint name, ordered by layer: codes and scales where quantized, else the tensor itself."""
    quantized: dict[str, Quantized]
    """Quantized weights by their names."""
    saturated: list[tuple[int, float]]
    """(elements, share beyond the largest code) of tensors that came with a scale."""


def export(stream: Stream, plan: Plan, order: Mapping[str, tuple[int, ...]], device: torch.device) -> Export:
    """Quantize what the plan quantizes. `order`: the checkpoint's names in model order.

    Raises ValueError for scales that do not fit.
    """
    result = Export(tensors=[], quantized={}, saturated=[])
    for names in fused(order):
        if not is_quantized(plan, names[0]):
            result.tensors.extend((name, stream.tensors[name]) for name in names)
            continue
        fmt = weight_format(plan, names[0])
        assert fmt is not None
        received = {name: stream.tensors[name].to(device, base_dtype(plan)) for name in names}
        given = {name: stream.scales[name].to(device) for name in names if name in stream.scales}
        if 0 < len(given) < len(names):
            lacking = next(name for name in names if name not in given)
            raise ValueError(f"{lacking} comes without a scale, other parts of its fused matrix with one")
        if has_tensor_scale(fmt):
            check_one_scale(names, [*given.values()])
        amax = merged_amax([*received.values()], fmt)
        for name, w in received.items():
            zero = stream.zeros[name].to(device) if name in stream.zeros else None
            q = quantize(w, fmt, scale=given.get(name), zero_point=zero, tensor_amax=None if given else amax)
            if name in given:
                result.saturated.append((w.numel(), saturated_frac(w, q)))
            result.quantized[name] = q
            result.tensors.extend(checkpoint_tensors(name, q))
    return result


def checkpoint_tensors(name: str, q: Quantized) -> Iterator[tuple[str, Tensor]]:
    """A quantized weight by compressed-tensors' names and shapes."""
    stem = name.removesuffix("weight")
    for kind, tensor in pack(q).items():
        if kind == "weight_scale_inv":
            kind = "weight_scale"
        if kind == "weight_scale" and q.fmt.tile == (0, 0):
            tensor = tensor.reshape(1)
        yield f"{stem}{kind}", tensor
