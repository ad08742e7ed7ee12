"""The scales of an FP8 KV cache in a live vLLM model: observe, set, read back.

A scale lives three times, on the device (`_k_scale`), as a Python float (`_k_scale_float`) and, in some versions, as a
tensor of the host (`_k_scale_cpu`); kernels read one or another, so all are written together. Where queries are
quantized too (FP8 FlashAttention), theirs is set beside: a missing one is silently 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.api import KVProtocol
from harness.numerics.formats import Format
from harness.numerics.kv_scales import Role, inference_scale, kv_scale

ROLES: tuple[Role, ...] = ("q", "k", "v")
PLAIN = ("auto", "bfloat16", "float16", "float32")
"""vLLM's names of a cache in the base dtype."""


def attentions(model: nn.Module) -> dict[int, Any]:
    """Layer number -> its attention module."""
    found = {name: m for name, m in model.named_modules() if hasattr(m, "_k_scale") and hasattr(m, "kv_cache_dtype")}
    return {int(name.split("layers.")[1].partition(".")[0]): module for name, module in found.items()}


@contextmanager
def calibrated(model: nn.Module, fmt: Format, protocol: KVProtocol, *, has_queries: bool) -> Iterator[None]:
    """While the block runs, every attention takes its scales from what enters it, after norms and rotation.

    They are set before that layer stores anything, so that no layer reads a cache of old scales and the result does not
    depend on them. Over several forwards (many prompts) the largest magnitude so far counts.
    """
    handles: list[Any] = []
    for module in attentions(model).values():
        largest: dict[Role, Tensor] = {role: torch.zeros((), device=module._k_scale.device) for role in ROLES}

        def settle(own: Any, inputs: tuple[Tensor, ...], amax: dict[Role, Tensor] = largest) -> None:
            for role, x in zip(ROLES, inputs, strict=False):
                amax[role] = torch.maximum(amax[role], x.detach().abs().amax().float())
            set_scales(own, scales_of(amax, fmt, protocol, has_queries=has_queries))

        handles.append(module.register_forward_pre_hook(settle))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def scales_of(
    amax: Mapping[Role, Tensor], fmt: Format, protocol: KVProtocol, *, has_queries: bool
) -> dict[Role, float]:
    """One layer's scales by role, by one of the two protocols (precision.md 6.2); queries 1 where not quantized."""
    scales: dict[Role, Tensor] = {
        role: inference_scale(amax[role], fmt, role) if protocol == "inference" else kv_scale(amax[role], fmt)
        for role in ROLES
    }
    return {role: float(scale) if role != "q" or has_queries else 1.0 for role, scale in scales.items()}


def set_scales(module: Any, scales: Mapping[Role, float]) -> None:
    """Write scales to every copy that a kernel may read."""
    for role, scale in scales.items():
        getattr(module, f"_{role}_scale").detach().fill_(scale)
        setattr(module, f"_{role}_scale_float", scale)
        host = getattr(module, f"_{role}_scale_cpu", None)
        if host is not None:
            host.fill_(scale)


def all_scales(model: nn.Module) -> dict[int, dict[Role, float]]:
    """Layer number -> the scales that its kernels read. Raises RuntimeError where the copies of one differ."""
    modules = attentions(model)
    held = [getattr(module, f"_{role}_scale").detach().reshape(-1)[0] for module in modules.values() for role in ROLES]
    values = iter(torch.stack(held).tolist() if held else [])
    found: dict[int, dict[Role, float]] = {}
    for layer, module in modules.items():
        found[layer] = {role: next(values) for role in ROLES}
        for role, device in found[layer].items():
            hosts = [getattr(module, f"_{role}_scale_float"), getattr(module, f"_{role}_scale_cpu", None)]
            for host in (float(copy) for copy in hosts if copy is not None):
                if torch.tensor(device) != torch.tensor(host):
                    raise RuntimeError(f"layer {layer}: {role}_scale is {device} on the device, {host} on the host")
    return found


def cache_format(model: nn.Module, formats: Mapping[str, str]) -> str | None:
    """The format of the cache by the dtype that every layer stores; None where it is the base dtype.

    `formats`: our name -> vLLM's. Raises RuntimeError where layers differ, for names that vLLM accepts and ignores, and
    where the memory is of another width.
    """
    modules = attentions(model).values()
    kinds = {str(module.kv_cache_dtype) for module in modules}
    if len(kinds) != 1:
        raise RuntimeError(f"kv_cache_dtype differs between layers: {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    names = {theirs: ours for ours, theirs in formats.items()}
    if kind not in names and kind not in PLAIN:
        raise RuntimeError(f"kv_cache_dtype={kind}, which is no format of a plan")
    widths = {_cache_tensor(module).element_size() for module in modules}
    if kind in names and widths != {1}:
        raise RuntimeError(f"kv_cache_dtype={kind}, but the cache holds elements of {sorted(widths)} bytes")
    return names.get(kind)


def _cache_tensor(module: Any) -> Tensor:
    cache = module.kv_cache
    while not isinstance(cache, Tensor):
        cache = cache[0]
    return cache
