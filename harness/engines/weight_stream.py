"""Reader of weight streams: every tensor once, by checkpoint name, or a ValueError that names what is wrong, as for a
plan that names none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from harness.api import Plan, WeightStream, weight_format
from harness.engines.adapter_shapes import check_adapters
from harness.foundation.did_you_mean import listed
from harness.models.adapters import LORA
from harness.numerics.kv_scales import ENDINGS


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A whole stream, sorted by what its tensors are. References, not copies."""

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]
    """`*.weight_scale`, by the name of the weight."""
    zeros: dict[str, Tensor]
    """`*.weight_zero_point`, by the name of the weight."""
    adapters: dict[str, Tensor]
    """`*.lora_A.weight` and `*.lora_B.weight`, by their own name."""
    kv: dict[str, Tensor]
    """`*.k_scale` and `*.v_scale` of attention layers, by their own name."""


def read_stream(weights: WeightStream, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Stream:
    """Sort a stream and check it against the checkpoint's `shapes`; KV scales are welcome where the plan has a cache
    for them.

    Raises ValueError for missing, unexpected, repeated or misshapen tensors, and for a scale or zero point that the
    tensor's format does not have; adapters and KV scales are left to `check_beside`.
    """
    stream = Stream(tensors={}, scales={}, zeros={}, adapters={}, kv={})
    unexpected: list[str] = []
    for name, tensor in weights:
        kind, key = stream.tensors, name
        if name.endswith(".weight_scale"):
            kind, key = stream.scales, name.removesuffix("_scale")
        elif name.endswith(".weight_zero_point"):
            kind, key = stream.zeros, name.removesuffix("_zero_point")
        elif plan.rollout_kv is not None and name.endswith(ENDINGS):
            kind = stream.kv
        elif name.endswith(LORA):
            kind = stream.adapters
        if not any(kind is own for own in (stream.kv, stream.adapters)) and key not in shapes:
            unexpected.append(name)
        elif key in kind:
            raise ValueError(f"{name} is in the stream twice")
        elif kind is stream.tensors and tuple(tensor.shape) != shapes[key]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model needs {shapes[key]}")
        else:
            if kind is stream.scales or kind is stream.zeros:
                _check_quantized(name, key, plan, is_zero=kind is stream.zeros)
            kind[key] = tensor
    missing = [name for name in shapes if name not in stream.tensors]
    if missing or unexpected:
        raise ValueError(f"weight stream: missing {listed(missing)}; unexpected {listed(unexpected)}")
    return stream


def _check_quantized(name: str, key: str, plan: Plan, *, is_zero: bool) -> None:
    """Raises ValueError where the format of tensor `key` has no place for `name`, its scale or zero point."""
    fmt = weight_format(plan, key)
    if fmt is None or fmt.tile is None:
        raise ValueError(f"{name} is in the stream, and the plan does not quantize {key}")
    if is_zero and fmt.symmetric:
        raise ValueError(f"{name} is in the stream, and {fmt.name} has no zero point")


def check_beside(
    stream: Stream, shapes: Mapping[str, tuple[int, ...]], adapters: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError for what comes beside the weights and has no place: adapters other than `adapters` (as
    `adapter_shapes` gives them; empty for a plan without), and KV scales of a layer that is not among the checkpoint's
    `shapes`, or of more than one number."""
    check_adapters(adapters, stream.adapters)
    for name, scale in stream.kv.items():
        if f"{name.rpartition('.')[0]}.q_proj.weight" not in shapes:
            raise ValueError(f"{name} is in the stream, and the model has no such layer")
        if scale.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(scale.shape)}; a scale of the cache is one number")


def check_one_scale(names: Sequence[str], scales: Sequence[Tensor]) -> None:
    """Raises ValueError where the tensors `names` of one fused matrix come with different `scales`, and the matrix has
    one."""
    if not all(torch.equal(scale.reshape(-1), scales[0].reshape(-1)) for scale in scales):
        raise ValueError(f"{names[0]}_scale: {', '.join(names)} are one fused matrix and must share their scale")


def check_patterns(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError for an exception of the plan that matches no tensor of the checkpoint, whose `shapes` these
    are: it would change nothing."""
    for pattern, _ in plan.exceptions:
        if not any(fnmatchcase(name, pattern) for name in (*shapes, "lm_head.weight")):
            raise ValueError(f"exceptions: {pattern} matches no tensor; choose a pattern such as model.layers.0.*")
