"""Bytes of a machine's main memory in a run, from shapes alone.

    masters and moments  shards that wait there while the engine samples, where they are offloaded
    sleeping engines     every GPU's share of its engine during the update (vLLM's sleep level 1)
    file                 of the final model, which rank 0 writes in shards
    processes            trainer, server and engine of every GPU

A machine must have all of them together: pinned memory is kept for the next time, and the final model is written while
everything else stands. Offloaded tensors and sleeping engines are pinned, for which torch takes a power of two of bytes
for every tensor (`CachingHostAllocator.h`): up to twice what it holds. Before the first step, when no engine is there
yet, rank 0 reads the whole model in float32 for all ranks; where that takes more, it is what the machine must have.

Left out: a frozen reference (`algo.kl_coef`: float32 shards, pinned too), earlier versions of the weights
(`algo.staleness`: float32 shards each), `launch.offload=host`, and the page cache that files are read through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from math import prod

from harness.api import weight_format
from harness.engines.vllm.memory import num_parameters, tensor_bytes
from harness.engines.vllm.push_by_reload import PACKED
from harness.foundation.clock import GIB
from harness.models.decoder import tensor_shapes
from harness.models.shards import SHARD_BYTES
from harness.studies.capacity.memory import FROZEN_BYTES, LORA_RANK, WEIGHT_BYTES, Parts
from harness.studies.throughput.estimates import UTILIZATION
from harness.studies.throughput.shapes import plan_of, shape_of

NODE = 8
"""GPUs of a machine."""
HOST_GIB = 256.0
"""Main memory of a machine for every GPU: 2 TiB beside eight H200, as in a DGX H200 (others have 1.8 to 3 TiB)."""
PROCESS_GIB = 6.0
"""Processes of a job on one GPU, measured with the smallest model (docs/verl.md); assumed for each GPU of a job."""
MOMENTS = 2
"""Float32 tensors of AdamW for each that is trained."""
FUSED = {part: whole for whole, parts in PACKED.items() for part in parts}
"""Layer -> the one of vLLM that holds its weight."""


def usable_gib(host_gib: float, gpus: int) -> float:
    """Main memory that a plan may fill on a machine, whose other GPUs have their own share of it."""
    return UTILIZATION * host_gib * min(gpus, NODE)


def pinned_bytes(num_bytes: float) -> int:
    """Bytes that torch takes for a pinned tensor: a power of two."""
    return 1 << (math.ceil(num_bytes) - 1).bit_length()


@cache
def sleeping_bytes(size: str, precision: str, ways: int) -> int:
    """Pinned bytes of a GPU's share of an engine over `ways` GPUs."""
    plan, sizes = plan_of(precision), dict[tuple[str, ...], int]()
    for name, shape in tensor_shapes(shape_of(size)).items():
        *block, layer, kind = ("", *name.split("."))
        key = (*block, FUSED.get(layer, layer), kind)
        sizes[key] = sizes.get(key, 0) + tensor_bytes(shape, weight_format(plan, name), plan)
    return sum(pinned_bytes(each / ways) for each in sizes.values())


@cache
def offloaded_bytes(size: str, gpus: int, is_lora: bool) -> int:
    """Pinned bytes of a rank's shards of masters and moments; FSDP cuts rows."""
    shapes = list(tensor_shapes(shape_of(size)).items())
    adapters = [shape for name, whole in shapes if name.endswith("_proj.weight") for shape in _adapter(whole)]
    masters = [shape for _, shape in shapes]
    trained = (1 + MOMENTS) * (adapters if is_lora else masters)
    held = [(WEIGHT_BYTES, shape) for shape in trained] + [(FROZEN_BYTES, shape) for shape in masters if is_lora]
    return sum(pinned_bytes(width * math.ceil(shape[0] / gpus) * prod(shape[1:])) for width, shape in held)


def _adapter(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    yield LORA_RANK, shape[1]
    yield shape[0], LORA_RANK


def host_parts(
    size: str, precision: str, gpus: int, ways: int, *, is_offloaded: bool = False, is_lora: bool = False
) -> Parts:
    """GiB on the machine of rank 0, whose GPUs have an engine over `ways` of them each: at the start or in the steps,
    whichever takes more."""
    here, whole = min(gpus, NODE), WEIGHT_BYTES * num_parameters(shape_of(size))
    start = {"masters and moments": 0.0, "sleeping engines": 0.0, "file": 0.0, "whole model": whole / GIB}
    steps = {
        "masters and moments": here * offloaded_bytes(size, gpus, is_lora) / GIB if is_offloaded else 0.0,
        "sleeping engines": here * sleeping_bytes(size, precision, ways) / GIB,
        "file": min(whole, SHARD_BYTES) / GIB,
        "whole model": 0.0,
    }
    return max(start, steps, key=lambda parts: sum(parts.values())) | {"processes": here * PROCESS_GIB}
