"""Bytes on a GPU in the two phases of a step that decide what fits: sampling and the update. From shapes alone.

    sampling  engine weights, the engine's own overhead, the trainer's masters and moments, room for a push; the cache
              gets what is left
    update    masters, gradients, moments; weights that are gathered or cast; activations; logits. The engine sleeps.

Offloading moves masters and moments to the host while the engine samples. With LoRA the masters are frozen, and
gradients and moments are of the adapters. Sequence parallelism gives a GPU fewer tokens of a pass.

Both trainers work on float32 values and multiply 16-bit casts of them, or FP8 codes (`harness.trainers.local.policy`):
the local one on one GPU, verl on several, where parameters are gathered in float32.
"""

from __future__ import annotations

from functools import cache
from math import prod

from harness.config.schema import Launch
from harness.engines.vllm.memory import kv_bytes_per_token, num_parameters, weight_bytes
from harness.foundation.clock import GIB
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.studies.throughput.estimates import DEVICE_GIB, OVERHEAD_GIB, UTILIZATION, kv_tokens_needed
from harness.studies.throughput.shapes import plan_of, shape_of

USABLE_GIB = UTILIZATION * DEVICE_GIB
"""Memory that a plan may fill; the rest is for fragments, graphs and libraries."""
STATE_BYTES, GRADIENT_BYTES, WEIGHT_BYTES, FROZEN_BYTES = 12, 4, 4, 2
"""Per parameter: float32 master and two moments, which stay while the engine samples; float32 gradient; what FSDP
gathers; a frozen one of a bfloat16 checkpoint at rest (`harness.trainers.at_rest`)."""
BUCKET_BYTES = 2 * 2**30
"""verl's buffer in which weights travel to the engine."""
LORA_RANK = 32
"""Rank of the adapters on every linear layer of a block, where a plan trains adapters."""
BLOCK = 16
"""Tokens of a block of vLLM's cache."""
LOGIT_BYTES = 12
"""Per logit that stands: itself, its probability and its gradient in float32."""
Parts = dict[str, float]
"""Name -> GiB on one GPU."""


@cache
def engine_bytes(size: str, precision: str) -> tuple[float, int]:
    """(weights, keys and values of a token) of an engine."""
    config, plan = shape_of(size), plan_of(precision)
    return weight_bytes(config, plan), kv_bytes_per_token(config, plan)


@cache
def linear_parameters(size: str) -> tuple[int, int, int]:
    """(of the linear layers of a block, of a whole block, of what is outside blocks: embedding, head, last norm)."""
    config = shape_of(size)
    shapes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    block = {name: count for name, count in shapes.items() if name.startswith("model.layers.0.")}
    linear = sum(count for name, count in block.items() if name.endswith("_proj.weight"))
    whole = sum(block.values())
    return linear, whole, sum(shapes.values()) - config.num_layers * whole


@cache
def adapter_parameters(size: str) -> int:
    """Parameters of the adapters of all layers."""
    shapes = tensor_shapes(shape_of(size))
    return LORA_RANK * sum(sum(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))


def trained_parameters(size: str, is_lora: bool) -> int:
    """Parameters that have gradients and moments."""
    return adapter_parameters(size) if is_lora else num_parameters(shape_of(size))


def state_bytes(size: str, is_lora: bool, is_sharded: bool, arithmetic: str = "bf16") -> int:
    """Bytes of masters and moments, over all GPUs. Of a frozen base FSDP's trainer lets everything rest in half the
    bytes, the local one the linear layers of blocks, where it computes in BF16."""
    config = shape_of(size)
    if not is_lora:
        return STATE_BYTES * num_parameters(config)
    linear = config.num_layers * linear_parameters(size)[0] if arithmetic == "bf16" else 0
    resting = num_parameters(config) if is_sharded else linear
    frozen = FROZEN_BYTES * resting + WEIGHT_BYTES * (num_parameters(config) - resting)
    return frozen + STATE_BYTES * adapter_parameters(size)


def sampling_parts(
    size: str, precision: str, gpus: int, ways: int, *, is_offloaded: bool = False, is_lora: bool = False,
    arithmetic: str = "bf16",
) -> Parts:  # fmt: skip
    """Memory of a GPU beside the cache, its replica being spread over `ways` GPUs. `arithmetic`: of the trainer."""
    config, state = shape_of(size), state_bytes(size, is_lora, gpus > 1, arithmetic)
    bucket = BUCKET_BYTES if gpus > 1 or is_offloaded else 0
    largest = 4 * config.vocab_size * config.hidden_size
    return {
        "engine weights": engine_bytes(size, precision)[0] / ways / GIB,
        "engine overhead": OVERHEAD_GIB,
        "masters and moments": 0.0 if is_offloaded else state / gpus / GIB,
        "push": (bucket + largest) / GIB,
    }


def at_once(size: str, precision: str, tokens: int, cache_gib: float, ways: int) -> int:
    """Responses of `tokens` tokens, prompt included, that a cache of so many GiB per GPU holds. A GPU of a tensor
    parallel replica has its share of the key-value heads, one at least."""
    per_token = engine_bytes(size, precision)[1] / min(ways, shape_of(size).num_kv_heads)
    return max(0, int(cache_gib * GIB / (per_token * kv_tokens_needed(1, tokens, BLOCK))))


def layer_bytes(config: DecoderConfig) -> int:
    """Per token: what autograd keeps of one decoder layer (`harness.models.decoder`, on a GPU, where keys and values
    are repeated to all heads): inputs and outputs of norms, products, attention and SwiGLU."""
    d, wide, ff = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    small = 4 * (2 + config.num_heads)  # norms' inverses and the softmax' sums
    return 4 * (2 * d + 4 * wide + 3 * ff) + 2 * (5 * d + wide + ff) + small


def update_parts(
    size: str, arithmetic: str, gpus: int, tokens: int, is_checkpointed: bool, *, is_lora: bool = False,
    is_sharded: bool | None = None,
) -> Parts:  # fmt: skip
    """Memory of a GPU at the peak of a backward pass over `tokens` tokens of its own. `is_sharded`: FSDP's trainer;
    None where there are several GPUs."""
    config = shape_of(size)
    is_sharded = gpus > 1 if is_sharded is None else is_sharded
    linear, block, outside = linear_parameters(size)
    layers = config.num_layers
    kept = layer_bytes(config) * (1 if is_checkpointed else layers)
    kept += 4 * config.hidden_size * layers if is_checkpointed else 0
    # 16-bit casts live until the backward pass; FP8 codes for both axes are held for a whole update, by verl for none
    is_brief = is_checkpointed if arithmetic == "bf16" else is_sharded
    weights = 2 * linear * (1 if is_brief else layers)
    if is_sharded:  # FSDP: a layer and the next one, embedding and head throughout; gradients of one unit and of those
        unit = adapter_parameters(size) / layers if is_lora else block + outside
        weights += WEIGHT_BYTES * (2 * block + outside) + GRADIENT_BYTES * unit
    logits = LOGIT_BYTES * min(tokens * config.vocab_size, Launch().logits_mib * 2**20 // 4)  # the head works in chunks
    return {
        "masters and moments": state_bytes(size, is_lora, is_sharded, arithmetic) / gpus / GIB,
        "gradients": GRADIENT_BYTES * trained_parameters(size, is_lora) / gpus / GIB,
        "gathered or cast weights": weights / GIB, "activations": kept * tokens / GIB, "logits": logits / GIB,
    }  # fmt: skip
