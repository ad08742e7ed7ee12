"""Measured costs of the stages of a step on an NVIDIA H200, from committed results, for forecasts of whole steps.

    decode    bare vLLM by size, precision, batch and context (`results/throughput`)
    push      measured at 7B (`results/bench/vllm_sync_7b.json`); other sizes by parameters; a format that was not
              pushed costs what the slowest that was does
    training  forward and backward of one 7B layer (`fp8_layers_7b.json`); whole models by operations, AdamW by bytes at
              the rate of a device copy, measured beside the pushes

Left out: what a step is made of, which `harness.studies.break_even.hardware` and `harness.studies.capacity` say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines.vllm.memory import num_parameters
from harness.foundation.json_object import read_json_object
from harness.models.decoder import DecoderConfig
from harness.records.paths import bench_folder
from harness.studies.throughput.plan import Sweep
from harness.studies.throughput.records import read_records
from harness.studies.throughput.shapes import shape_of
from harness.sweep.folder_time import ADAM_BYTES

RATES = "throughput_h200"
"""The sweep of the decode rates."""
SIZE = "7b"
"""Size of the layer and of the push that were timed."""
TRAIN = {"bf16": "bf16, fp32 masters, compiled", "fp8": "fp8 held, mixed, compiled"}
"""Arithmetic of the trainer -> the timed layer."""
ARMS = {
    "fp8_block": ("fp8_block", "bf16"), "fp8_block+kv8": ("fp8_block+kv8", "bf16"), "int8": ("int8", "bf16"),
    "nvfp4": ("nvfp4", "bf16"), "int4": ("int4", "bf16"), "one FP8 flow": ("fp8_block", "fp8"),
}  # fmt: skip
"""Name -> (precision of the rollouts, arithmetic of the trainer)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that the estimate rests on."""

    records: Mapping[str, Any]
    """"<size>-<precision>" -> record of the throughput sweep."""
    push_s: Mapping[str, float]
    """Precision -> seconds of a push at 7B."""
    layer_s: Mapping[str, tuple[float, float]]
    """Arithmetic -> seconds per operation of (forward, forward and backward)."""
    bytes_per_s: float


def operations(config: DecoderConfig, length: float) -> tuple[float, float]:
    """(forward, forward and backward) operations per token of one layer at responses of `length` tokens, causal."""
    d, wide = config.hidden_size, config.num_heads * config.head_dim
    weights = d * (2 * wide + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
    attention = 2 * length * wide
    return 2 * weights + attention, 6 * weights + 3.5 * attention


def read_measured(results: Path, sweep: Sweep) -> Measured:
    """Committed measurements. Raises ValueError, one line, naming the file that is missing or is none."""
    bench = bench_folder(results)
    layers, pushes = (read_json(bench / name) for name in ("fp8_layers_7b.json", "vllm_sync_7b.json"))
    rows = {row["what"]: row for row in layers["layers"]}
    per_token = operations(shape_of(SIZE), layers["length"])
    layer_s = {
        name: (
            rows[what]["forward_ms"] / 1e3 / (layers["tokens"] * per_token[0]),
            rows[what]["ms"] / 1e3 / (layers["tokens"] * per_token[1]),
        )
        for name, what in TRAIN.items()
    }
    push_s = {
        part["precision"]: part["push"]["median_ms"] / 1e3
        for part in pushes["parts"]
        if part.get("way") == "direct" and "push" in part
    }
    copied = max(part["num_bytes"] / part["limit"]["median_ms"] for part in pushes["parts"] if "limit" in part)
    records = read_records(results, sweep)
    if f"{SIZE}-bf16" not in records:
        raise ValueError(f"{results}/throughput/{sweep.name}: no measured rates; lowbit throughput {sweep.name}")
    return Measured(records=records, push_s=push_s, layer_s=layer_s, bytes_per_s=1e3 * copied)


def read_json(path: Path) -> dict[str, Any]:
    """A file of `results/bench`. Raises ValueError naming one that is missing or is no JSON."""
    return read_json_object(path, "python -m harness.devtools.bench measures it")


def push_s(found: Measured, size: str, precision: str) -> float:
    """Seconds of a push into the engine of one GPU."""
    at_7b = found.push_s.get(precision.removesuffix("+kv8"), max(found.push_s.values()))
    return at_7b * num_parameters(shape_of(size)) / num_parameters(shape_of(SIZE))


def training_s(found: Measured, config: DecoderConfig, arithmetic: str, length: float) -> tuple[float, float]:
    """(forward, forward and backward) seconds per token of all layers and the head, at sequences of `length` tokens.

    The head computes in BF16 whatever the layers do.
    """
    head = config.vocab_size * config.hidden_size
    score, learn = (
        config.num_layers * per_layer * rate + per_head * plain
        for per_layer, per_head, rate, plain in zip(
            operations(config, length), (2 * head, 6 * head), found.layer_s[arithmetic], found.layer_s["bf16"],
            strict=True,
        )
    )  # fmt: skip
    return score, learn


def adam_s(found: Measured, config: DecoderConfig) -> float:
    """Seconds of AdamW's pass over all parameters on one GPU."""
    return num_parameters(config) * ADAM_BYTES / found.bytes_per_s
