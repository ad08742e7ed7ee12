"""Seconds of a step on GPUs: measured rates of one H200, and assumed bandwidths for what lies between GPUs.

    generate     every prompt read at the measured rate (no prefix is shared), decode time at the batch that a replica
                 runs, linear between measured batches, as often as it takes; tensor parallel (assumed): divided by its
                 GPUs, with two all-reduces per layer and token
    push         as measured on one GPU
    sleep        engine weights to the host and back (vLLM's sleep level 1), at an assumed rate
    score        a forward pass for old log-probs
    update       forward, backward and AdamW's pass over the shard; checkpointed layers run forward once more
    communicate  FSDP: whole weights once per scoring pass and twice per update pass, gradients once per update pass,
                 and whole float32 masters for the push. Not overlapped with computing: an upper bound.

Work divides by the GPUs in whole responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.engines.vllm.memory import num_parameters
from harness.studies.capacity.memory import GRADIENT_BYTES, WEIGHT_BYTES, engine_bytes
from harness.studies.capacity.place import NODE, GpuSplit, Work
from harness.studies.stage_rates import Measured, adam_s, operations, push_s, training_s
from harness.studies.throughput.cost import generation_s
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
        """Seconds."""
        return sum(self.seconds.values())


def decode_s(record: Mapping[str, Any], batch: int, prompt: int, length: int) -> tuple[float, set[int]] | None:
    """(seconds, measured batches that it rests on) of a generation of `batch` responses; None beyond the measured."""
    batches = sorted({int(key.partition("x")[0]) for key in record.get("cells", {})})
    known = {n: s for n in batches if (s := generation_s(record, n, prompt, length)) is not None}
    above = min((n for n in known if n >= batch), default=None)
    below = max((n for n in known if n <= batch), default=None)
    if above is None or below is None:
        return None
    return float(np.interp(batch, list(known), list(known.values()))), {above, below}


def most_measured(record: Mapping[str, Any], prompt: int, length: int) -> int:
    """The largest batch that was timed up to this length; 0 where none was."""
    batches = {int(key.partition("x")[0]) for key in record.get("cells", {})}
    return max((n for n in batches if generation_s(record, n, prompt, length) is not None), default=0)


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


def step(found: Measured, work: Work, at: GpuSplit, links: Links) -> StepTime | None:
    """The stages of a step; None where it does not fit or its engine was not timed so far."""
    record = found.records.get(f"{work.size}-{work.precision}", {})
    most = min(at.share, at.at_once, most_measured(record, work.prompt, work.length))
    if at.reason or most < 1:
        return None
    rounds = math.ceil(at.share / most)
    decoded = decode_s(record, math.ceil(at.share / rounds), work.prompt, work.length)
    assert decoded is not None, "between the measured batches"
    config = shape_of(work.size)
    reduces = 2 * config.num_layers * work.length * links.all_reduce_us / 1e6 if at.ways > 1 else 0.0
    read = prefill_s(record, at.share * work.prompt)
    weights = engine_bytes(work.size, work.precision)[0] / at.ways
    own = math.ceil(work.batch / at.gpus)
    score, learn = training_s(found, config, work.arithmetic, work.row)
    again = config.num_layers * operations(config, work.row)[0] * found.layer_s[work.arithmetic][0]
    learn += again if at.is_checkpointed else 0.0
    used = {(n, length) for n in decoded[1] for length in _lengths(record) if length <= max(work.length, 512)}
    return StepTime(
        seconds={
            "generate": (read + rounds * decoded[0]) / at.ways + rounds * reduces,
            "push": push_s(found, work.size, work.precision),
            "sleep": 2 * weights / (1e9 * links.host),
            "score": own * work.row * score,
            "update": own * work.row * learn + adam_s(found, config) / at.gpus,
            "communicate": communicate_s(work, at, links),
        },
        rounds=rounds,
        is_host_bound=bool(used & host_bound_cells(record)),
    )


def communicate_s(work: Work, at: GpuSplit, links: Links) -> float:
    """FSDP's collectives of a step, and the weights that a push makes whole."""
    if at.gpus == 1:
        return 0.0
    count = num_parameters(shape_of(work.size))
    passes = math.ceil(math.ceil(work.batch / at.gpus) / at.rows)
    gather, reduce, whole = (
        collective_s(links, at.gpus, bytes_each * count) for bytes_each in (WEIGHT_BYTES, GRADIENT_BYTES, 4)
    )
    return passes * (3 * gather + reduce) + whole


def _lengths(record: Mapping[str, Any]) -> set[int]:
    return {int(key.partition("x")[2]) for key in record.get("cells", {})}
