"""Memory that a model and its cache need on a device, estimated from shapes before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch

from harness.api import Plan, base_dtype, weight_format
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.effective_bits import stored_bits
from harness.numerics.formats import Format

SMALL_CACHE = 4 * 2**30
"""Bytes up to which a cache for every sequence at full length is simply reserved."""
PAGE = 64
"""Tokens whose keys and values vLLM keeps together, at most."""


@cache
def num_parameters(config: DecoderConfig) -> int:
    """Parameters, a tied head counted once."""
    return sum(prod(shape) for shape in tensor_shapes(config).values())


def used_parameters(config: DecoderConfig) -> int:
    """Parameters that a token is multiplied by: of a mixture's experts those of its share."""
    experts = sum(prod(shape) for name, shape in tensor_shapes(config).items() if ".experts." in name)
    idle = experts * (config.num_experts - config.num_experts_per_tok) // max(config.num_experts, 1)
    return num_parameters(config) - idle


def weight_bytes(config: DecoderConfig, plan: Plan) -> int:
    """Bytes of all weights with their scales, as the engine holds them."""
    return sum(tensor_bytes(shape, weight_format(plan, name), plan) for name, shape in tensor_shapes(config).items())


def tensor_bytes(shape: tuple[int, ...], fmt: Format | None, plan: Plan) -> int:
    """Bytes of one tensor of `shape` under `fmt` (None: the engine's dtype), its scales and zero points included."""
    if fmt is None:
        return prod(shape) * base_dtype(plan).itemsize
    return -(-stored_bits(shape, fmt) // 8)


def kv_bytes_per_token(config: DecoderConfig, plan: Plan) -> int:
    """Bytes of K and V of one token over all layers."""
    width = 1 if plan.rollout_kv is not None else base_dtype(plan).itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * width


def check_fits(
    config: DecoderConfig, plan: Plan, device: torch.device, gpu_memory: float, max_length: int | None = None
) -> None:
    """Raises ValueError, one line, where weights and the cache of one sequence of `max_length` tokens (None: all of the
    model's positions) exceed the device's share."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(device).total_memory
    length = min(max_length or config.max_positions, config.max_positions)
    needed = weight_bytes(config, plan) + kv_bytes_per_token(config, plan) * length
    if needed > gpu_memory * total:
        raise ValueError(
            f"the model needs {needed / 2**30:.1f} GiB for weights and one sequence of {length} tokens; "
            f"{gpu_memory:g} of the GPU's {total / 2**30:.1f} GiB is given to vLLM; choose a narrower precision, a "
            "smaller model, shorter sequences (engine.max_model_len) or a larger share (engine.gpu_memory)"
        )


def small_cache(config: DecoderConfig, plan: Plan, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The argument of `vllm.LLM` that reserves a cache for all sequences that others of its `arguments` allow, at full
    length, where that is small; empty otherwise, and on a CPU, whose cache is set by the environment.

    vLLM else measures what is free before and after a trial run, and gives up where another process on the GPU frees
    memory in between: engines of small models that share a GPU would make each other fail.
    """
    if "gpu_memory_utilization" not in arguments:
        return {}
    pages = arguments["max_num_seqs"] * -(-arguments["max_model_len"] // PAGE) + 2
    reserved = pages * PAGE * kv_bytes_per_token(config, plan)
    return {"kv_cache_memory_bytes": reserved} if reserved <= SMALL_CACHE else {}


def check_allocator() -> None:
    """Raises ValueError, one line, where this process has had an engine that can sleep: vLLM's allocator serves one."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None and CuMemAllocator.instance.get_current_usage():
        raise ValueError(
            "can_sleep=True: this process has had another engine that can sleep, and vLLM's allocator serves one per "
            "process; start each in a process of its own, or choose can_sleep=False"
        )
