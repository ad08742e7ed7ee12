"""Synthetic throughput records: the step is an affine function of the context, so every integral has a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.studies.throughput.map_cells import cell_key
from harness.studies.throughput.plan import Sweep, cells, engine_specs, read_sweep
from harness.studies.throughput.records import Record, new_record

YAML = """
device: cuda
sizes: [7b, 0.5b]
precisions: [bf16, int8, int4]
lengths: [512, 1024, 4096]
batches: [1, 8, 64]
breakdown: [8]
pairs: [{size: 7b, precision: bf16, batch: 8, length: 1024}]
checks: [{size: 7b, precision: bf16, batch: 64, length: 4096, seconds: 100}]
"""
SPEED = {"bf16": 1.0, "int8": 0.8, "int4": 0.5}
"""Share of BF16's fixed step that a precision needs."""


def sweep(folder: Path, text: str = YAML, name: str = "throughput_made") -> Sweep:
    """The sweep of a YAML text."""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return read_sweep(str(path))


def step_ms(precision: str, batch: int, context: float) -> float:
    """4 ms of weights times the format's share, 0.001 ms a token, and int4's price of 0.1 ms a sequence."""
    return 4 * SPEED[precision] + 1e-3 * context + (0.1 * batch if precision == "int4" else 0.0)


def engine() -> dict[str, Any]:
    """Entry of a record about its engine."""
    return {
        "started_at": "2026-11-21T00:00:00+00:00", "device": "NVIDIA H200", "import_s": 9.0, "load_s": 8.0,
        "versions": {"torch": "2.11.0", "vllm": "0.24.0"}, "weights_gib": 14.2, "used_gib": 120.0, "block_size": 16,
        "kv_tokens": 200000, "log": ["Using SomeLinearKernel for it"], "arguments": {},
    }  # fmt: skip


def ok(precision: str, batch: int, length: int) -> dict[str, Any]:
    """A measured cell."""
    step = step_ms(precision, batch, length)
    return {
        "status": "ok", "step_ms": step, "step_ms_p10": step, "step_ms_p90": step, "tokens_per_s": 1e3 * batch / step,
        "num_steps": 24, "context": float(length), "is_filled": True, "admission_s": 0.1, "engine": 0,
        "measured_at": "2026-11-21T00:00:00+00:00",
    }  # fmt: skip


def records(made: Sweep) -> dict[str, Record]:
    """Everything measured, but 64 x 4096 of the 7B beyond the cache and the 0.5B in int4 failed."""
    found: dict[str, Record] = {}
    for spec in engine_specs(made):
        record: dict[str, Any] = new_record(made, spec) | {"engines": [engine()]}
        if spec.check is not None:
            check = {"batch": 64, "length": 4096, "prompt": 64, "seconds": 20.0, "steps": [], "windows": []}
            record["check"] = check
        elif spec.stem == "0.5b-int4":
            record |= {"engines": [], "failed": "RuntimeError: no kernel"}
        else:
            record["cells"] = {cell_key(*cell): ok(spec.precision, *cell) for cell in cells(made)}
            record["breakdown"] = {"8": {"step_ms": 5.0, "forward_ms": 3.0, "sampling_ms": 1.5, "host_ms": 0.5}}
            record["prefill"] = {"tokens": 8192, "seconds": 0.1, "tokens_per_s": 81920.0}
        if spec.size == "7b" and "cells" in record:
            kv = {"status": "skipped: kv", "needed_tokens": 265216, "kv_tokens": 200000}
            record["cells"]["64x4096"] = kv
        if spec.stem == "7b-bf16":
            record["pair"] = {"batch": 8, "length": 1024, "filled": {"step_ms": 5.1}, "prefilled": {"step_ms": 5.0}}
        found[spec.stem] = record
    return found


def cell_rows(text: str) -> list[Mapping[str, str]]:
    """The rows of a CSV text."""
    import csv
    import io

    return list(csv.DictReader(io.StringIO(text)))
