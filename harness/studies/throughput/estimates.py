"""Estimates before an engine is loaded: does a model fit, how much cache it leaves, about how long measuring takes.

Estimates; what an engine then says about its cache wins over them.
"""

from __future__ import annotations

from harness.engines.vllm.memory import kv_bytes_per_token, weight_bytes
from harness.foundation.clock import GIB
from harness.studies.throughput.map_cells import cell_of
from harness.studies.throughput.plan import EngineSpec, Sweep
from harness.studies.throughput.shapes import plan_of, shape_of

DEVICE_GIB = 139.8
"""An H200, as CUDA counts its memory."""
OVERHEAD_GIB = 3.0
"""CUDA context, activations of 8192 tokens, logits of 256 sequences and graphs, roughly."""
UTILIZATION = 0.9
"""Share of the device that the engine may take."""
BANDWIDTH = 3.8e12
"""Bytes/s that decoding reads on an H200, roughly (its data sheet says 4.8e12)."""
FIXED_S, PER_SEQUENCE_S = 3.5e-3, 2e-5
"""Seconds of a decode step beside reading weights and cache, once and per sequence: launches, sampling, the
scheduler."""
LOAD_S, CELL_S = 14.0, 0.15
"""To load an engine, and to admit and drain the sequences of a cell."""


def does_not_fit(size: str, precision: str, device_gib: float, shortest: int) -> str | None:
    """Reason why a model does not fit beside a cache for one sequence of `shortest` tokens, or None."""
    config, plan = shape_of(size), plan_of(precision)
    weights = weight_bytes(config, plan) / GIB
    needed = weights + kv_bytes_per_token(config, plan) * shortest / GIB + OVERHEAD_GIB
    there = UTILIZATION * device_gib
    if needed <= there:
        return None
    return f"memory: {weights:.1f} GiB of weights need about {needed:.1f} GiB, {there:.1f} GiB are there"


def kv_tokens_needed(batch: int, last: int, block_size: int) -> int:
    """Tokens of cache, in whole blocks, of `batch` sequences that reach `last` tokens each."""
    return batch * -(-last // block_size) * block_size


def kv_tokens_expected(size: str, precision: str, device_gib: float) -> int:
    """Tokens of cache that an engine has beside its weights."""
    config, plan = shape_of(size), plan_of(precision)
    free = (UTILIZATION * device_gib - OVERHEAD_GIB) * GIB - weight_bytes(config, plan)
    return max(0, int(free / kv_bytes_per_token(config, plan)))


def step_expected_s(size: str, precision: str, batch: int, context: float) -> float:
    """Seconds of a decode step: everything is read once, and what does not depend on size."""
    config, plan = shape_of(size), plan_of(precision)
    read = weight_bytes(config, plan) + kv_bytes_per_token(config, plan) * batch * context
    return read / BANDWIDTH + FIXED_S + PER_SEQUENCE_S * batch


def expected_s(sweep: Sweep, spec: EngineSpec, keys: list[str], device_gib: float) -> float:
    """Seconds to measure what an engine still lacks, `keys` (of `harness.studies.throughput.plan.missing`)."""
    if spec.check is not None:
        half = sweep.prompt + spec.check.length / 2
        return LOAD_S + spec.check.length * step_expected_s(spec.size, spec.precision, spec.check.batch, half)
    total, capacity = LOAD_S, kv_tokens_expected(spec.size, spec.precision, device_gib)
    for key in keys:
        batch, length = cell_of(key) if key[0].isdigit() else (0, 0)
        if not length:
            total += 1.0
        elif batch * length <= capacity:
            step = step_expected_s(spec.size, spec.precision, batch, length)
            counted = min(sweep.max_steps * step, max(sweep.min_steps * step, sweep.cell_s))
            total += counted + sweep.warm_steps * step + CELL_S
    return total
