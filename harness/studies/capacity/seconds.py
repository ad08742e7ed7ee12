"""Seconds of a step on GPUs: measured rates of one H200, and assumed bandwidths for what lies between GPUs.

    generate     every prompt read at the measured rate (no prefix is shared), decode time at the batch that a replica
                 runs, linear between measured batches, as often as it takes; tensor parallel (assumed): divided by its
                 GPUs, with two all-reduces per layer and token
    push         as measured on one GPU
    sleep        engine weights to the host and back (vLLM's sleep level 1), at an assumed rate
    score        a forward pass for old log-probs
    update       forward, backward and AdamW's pass over the shard; checkpointed layers run forward once more; frozen
                 weights under LoRA have no gradient
    communicate  FSDP: whole weights once per scoring pass and twice per update pass, gradients once per update pass,
                 and whole float32 masters for the push. Sequence parallelism: queries, keys, values and outputs of
                 every layer, float32, once per forward or recomputed pass and once per backward. Not overlapped with
                 computing: an upper bound.
    offload      masters there and back for log-probs, update and push, moments for the update

Work divides by the GPUs, or the groups that share a sequence, in whole responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.engines.vllm.memory import num_parameters
from harness.studies.capacity.host import NODE
from harness.studies.capacity.memory import (
    FROZEN_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    engine_bytes,
    state_bytes,
    trained_parameters,
)
from harness.studies.capacity.place import GpuSplit, Work
from harness.studies.stage_rates import Measured, adam_s, operations, push_s, training_s
from harness.studies.throughput.cost import generation_s
from harness.studies.throughput.map_cells import measured
from harness.studies.throughput.shapes import shape_of
from harness.studies.throughput.waiting import host_bound_cells


@dataclass(frozen=True, kw_only=True)
class Links:
    """Assumed rates between GPUs and to the host, as reached, in GB/s."""

    nvlink: float = 350.0
    """Per GPU, inside a node."""
    network: float = 320.0
    """Per node, between nodes: eight adapters of 400 Gb/s at 80 %."""
    host: float = 40.0
    """Per GPU, to the host's memory."""
    all_reduce_us: float = 20.0
    """A small all-reduce between the GPUs of an engine, microseconds."""

    def __post_init__(self) -> None:
        for name in ("nvlink", "network", "host", "all_reduce_us"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: a number above 0 is expected")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by stage."""

    seconds: Mapping[str, float]
    """Stage -> seconds."""
    rounds: int
    """Rounds in which an engine samples, one group of its responses at a time."""
    is_host_bound: bool
    """The decode rates rest on steps that waited for the host."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def timed(record: Mapping[str, Any], prompt: int, length: int) -> dict[int, float]:
    """Batch -> seconds of a generation, of the batches that were timed up to this length, smallest first."""
    batches = sorted({batch for batch, _ in measured(record)})
    return {n: s for n in batches if (s := generation_s(record, n, prompt, length)) is not None}


def decode_s(record: Mapping[str, Any], batch: int, prompt: int, length: int) -> tuple[float, set[int]] | None:
    """(seconds, measured batches that it rests on) of a generation of `batch` responses; None beyond the measured."""
    known = timed(record, prompt, length)
    above = min((n for n in known if n >= batch), default=None)
    below = max((n for n in known if n <= batch), default=None)
    if above is None or below is None:
        return None
    return float(np.interp(batch, list(known), list(known.values()))), {above, below}


def prefill_s(record: Mapping[str, Any], tokens: int) -> float:
    """Seconds to read so many tokens of prompts; 0 where that was not timed."""
    timed = record.get("prefill", {})
    return tokens * timed["seconds"] / timed["tokens"] if "seconds" in timed else 0.0


def collective_s(links: Links, gpus: int, num_bytes: float) -> float:
    """Seconds until every GPU has, or has given, `num_bytes` that are sharded over all: a ring in the node, and between
    nodes all adapters at once; the slower of both."""
    nodes = math.ceil(gpus / NODE)
    inside = num_bytes * (gpus - 1) / gpus / (1e9 * links.nvlink)
    return max(inside, num_bytes * (nodes - 1) / nodes / (1e9 * links.network))


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Sampling of a step."""

    seconds: float
    rounds: int
    """As in `StepTime`."""
    is_host_bound: bool


def generation(found: Measured, work: Work, at: GpuSplit, links: Links) -> Generation | None:
    """The responses of an engine; None where its cache holds none, or it was not timed so far."""
    record = found.records.get(f"{work.size}-{work.precision}", {})
    most = min(at.share, at.at_once, max(timed(record, work.prompt, work.length), default=0))
    if most < 1:
        return None
    rounds = math.ceil(at.share / most)
    decoded = decode_s(record, math.ceil(at.share / rounds), work.prompt, work.length)
    assert decoded is not None, "between the measured batches"
    layers = shape_of(work.size).num_layers
    reduces = 2 * layers * work.length * links.all_reduce_us / 1e6 if at.ways > 1 else 0.0
    read = prefill_s(record, at.share * work.prompt)
    waiting = [n for n, length in host_bound_cells(record) if length <= max(work.length, 512)]
    return Generation(
        seconds=(read + rounds * decoded[0]) / at.ways + rounds * reduces,
        rounds=rounds,
        is_host_bound=not decoded[1].isdisjoint(waiting),
    )


def step(found: Measured, work: Work, at: GpuSplit, links: Links) -> StepTime | None:
    """The stages of a step; None where it does not fit or its engine was not timed so far."""
    sampled = None if at.reason else generation(found, work, at, links)
    return None if sampled is None else step_after(found, work, at, links, sampled)


def step_after(found: Measured, work: Work, at: GpuSplit, links: Links, sampled: Generation) -> StepTime:
    """The stages of a step that fits, with its sampling."""
    config = shape_of(work.size)
    weights = engine_bytes(work.size, work.precision)[0] / at.ways
    own = own_tokens(work, at)
    score, learn = training_s(found, config, work.arithmetic, work.row)
    if at.layout.is_lora:
        learn -= frozen_s(found, work)
    again = config.num_layers * operations(config, work.row)[0] * found.layer_s[work.arithmetic][0]
    learn += again if at.is_checkpointed else 0.0
    return StepTime(
        seconds={
            "generate": sampled.seconds,
            "push": push_s(found, work.size, work.precision),
            "sleep": 2 * weights / (1e9 * links.host),
            "score": own * score,
            "update": own * learn + adam_s(found, config) * trained_share(work.size, at.layout.is_lora) / at.gpus,
            "communicate": communicate_s(work, at, links),
            "offload": offload_s(work, at, links),
        },
        rounds=sampled.rounds,
        is_host_bound=sampled.is_host_bound,
    )


def responses_of(work: Work, at: GpuSplit) -> int:
    """Responses of a GPU, or of the GPUs that share their sequences."""
    return math.ceil(work.batch * at.layout.split / at.gpus)


def own_tokens(work: Work, at: GpuSplit) -> int:
    """Tokens of a GPU in a step."""
    return math.ceil(responses_of(work, at) * work.row / at.layout.split)


def trained_share(size: str, is_lora: bool) -> float:
    """Share of the parameters that is trained."""
    return trained_parameters(size, is_lora) / num_parameters(shape_of(size))


def frozen_s(found: Measured, work: Work) -> float:
    """Seconds per token that gradients of all weights would take."""
    config = shape_of(work.size)
    head = 2 * config.vocab_size * config.hidden_size
    layers = config.num_layers * operations(config, 0)[0]
    return layers * found.layer_s[work.arithmetic][1] + head * found.layer_s["bf16"][1]


def communicate_s(work: Work, at: GpuSplit, links: Links) -> float:
    """FSDP's collectives of a step, the weights that a push makes whole, and what the GPUs of a sequence exchange."""
    if at.gpus == 1:
        return 0.0
    count = num_parameters(shape_of(work.size))
    passes = math.ceil(responses_of(work, at) / at.rows)
    trained = trained_parameters(work.size, at.layout.is_lora)
    gather, reduce, whole = (
        collective_s(links, at.gpus, num_bytes)
        for num_bytes in (WEIGHT_BYTES * count, GRADIENT_BYTES * trained, 4 * count)
    )
    return passes * (3 * gather + reduce) + whole + exchange_s(work, at, links)


def exchange_s(work: Work, at: GpuSplit, links: Links) -> float:
    """Sequence parallelism: every GPU sends all but its share of its tokens' heads, four tensors a layer and pass."""
    split, config = at.layout.split, shape_of(work.size)
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    each = 4 * config.head_dim * heads * config.num_layers * (split - 1) / split
    times = 3 + at.is_checkpointed  # forward for log-probs, forward and backward of the update, once more to compute
    return times * own_tokens(work, at) * each / (1e9 * links.nvlink)


def offload_s(work: Work, at: GpuSplit, links: Links) -> float:
    """Masters there and back three times, and moments once."""
    if not at.layout.is_offloaded:
        return 0.0
    masters = (FROZEN_BYTES if at.layout.is_lora else WEIGHT_BYTES) * num_parameters(shape_of(work.size))
    moments = state_bytes(work.size, at.layout.is_lora, is_sharded=True) - masters
    return 2 * (3 * masters + moments) / at.gpus / (1e9 * links.host)
