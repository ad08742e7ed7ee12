"""One engine process: imports, waits on standard input for what to measure, loads, measures what is missing, writes it.

Disturbed cells are measured again at its end (`harness.studies.throughput.settled`).

    {"sweep": {...}, "size": "7b", "precision": "int8", "check": null, "path": "...json", "deadline": 1234.5}

The imports touch no GPU, so the next process does them while the present one measures. An uncaught error is written
into the record where it happened: its cell, or the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from types import TracebackType

from harness.config.load import parse
from harness.foundation.clock import GIB
from harness.foundation.root_cause import root_cause
from harness.foundation.time_stamp import now
from harness.studies.throughput.engine_arguments import refusal
from harness.studies.throughput.estimates import does_not_fit, kv_tokens_needed
from harness.studies.throughput.loading import load, still, warm_up
from harness.studies.throughput.map_cells import cell_key, cell_of
from harness.studies.throughput.measure import measure_breakdown, measure_cell, measure_check, measure_prefill
from harness.studies.throughput.plan import EngineSpec, Sweep, cells, missing
from harness.studies.throughput.records import Record, new_record, read_record, write_record
from harness.studies.throughput.settled import MOST_REPEATS, doubtful, quieter
from harness.studies.throughput.stepping import Stepper

PRELOADED = (
    "vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "harness.studies.throughput.connector",
)  # fmt: skip
"""Modules that an engine imports on its way."""
RESERVE_S = 3.0
"""A measurement is not started with less time left."""


class Bench:
    """One engine's record, and the engine once it is loaded."""

    def __init__(self, sweep: Sweep, spec: EngineSpec, path: Path, deadline: float) -> None:
        self.sweep, self.spec, self.path, self.deadline = sweep, spec, path, deadline
        self.record: Record = read_record(path) or new_record(sweep, spec)
        self.record.pop("failed", None)
        self.doing = ""
        """The key of `missing` that is being measured."""

    def has_time(self, seconds: float = RESERVE_S) -> bool:
        """Are so many seconds left?"""
        return time.monotonic() + seconds < self.deadline

    def write(self) -> None:
        """Everything measured so far."""
        write_record(self.path, self.record)

    def refuse(self, reason: str) -> None:
        """Leave a record that says why nothing is measured."""
        self.record["skipped"] = reason
        self.write()

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """`sys.excepthook`: the root cause, where it belongs."""
        traceback.print_exception(kind, error, trace)
        line = root_cause(error)
        if "x" in self.doing and "cells" in self.record:
            old = self.record["cells"].get(self.doing, {})
            stands = {**old, "repeats": MOST_REPEATS, "note": f"measuring it again failed: {line}"}
            is_there = old.get("status") == "ok"
            self.record["cells"][self.doing] = stands if is_there else {"status": "failed", "reason": line}
        elif self.doing.startswith("breakdown/"):
            self.record["breakdown"][self.doing.partition("/")[2]] = {"status": "failed", "reason": line}
        elif self.doing:
            self.record[self.doing] = {"status": "failed", "reason": line}
        else:
            self.record["failed"] = line
        self.write()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    """Import, wait, measure, end at once: what an engine tears down frees nothing that the process's end does not."""
    started = time.perf_counter()
    for name in PRELOADED:
        import_module(name)
    import_s = time.perf_counter() - started
    line = sys.stdin.readline()
    if not line.strip():
        os._exit(0)
    given = json.loads(line)
    sweep = parse(Sweep, given["sweep"])
    check = None if given["check"] is None else sweep.checks[given["check"]]
    bench = Bench(
        sweep,
        EngineSpec(size=given["size"], precision=given["precision"], check=check),
        Path(given["path"]),
        given["deadline"],
    )
    sys.excepthook = bench.failed
    run(bench, import_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(bench: Bench, import_s: float) -> None:
    """Refuse, or load and measure."""
    import torch

    spec, sweep = bench.spec, bench.sweep
    is_cuda = sweep.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is visible")
    device_gib = torch.cuda.get_device_properties(0).total_memory / GIB if is_cuda else sweep.memory_gib
    reason = refusal(sweep, spec.size, spec.precision)
    if reason is None and device_gib is not None:
        reason = does_not_fit(spec.size, spec.precision, device_gib, sweep.lengths[0])
    if reason is not None:
        bench.refuse(reason)
        return
    stepper, told = load(sweep, spec, import_s)
    bench.record["engines"].append(told)
    bench.write()
    keys = missing(sweep, spec, bench.record)
    batches = [cell_of(key)[0] for key in keys if key[0].isdigit()]
    told["warm_s"] = round(warm_up(stepper, sweep, batches or [sweep.batches[0]]), 2)
    still()
    bench.write()
    if spec.check is not None:
        bench.doing = "check"
        found = measure_check(stepper, sweep, spec.check, lambda done: print(f"{done} tokens", flush=True))
        bench.record["check"] = {**found, "measured_at": now()}
        bench.write()
        return
    measure(bench, stepper, set(keys))


def measure(bench: Bench, stepper: Stepper, keys: set[str]) -> None:
    """Every missing measurement, written one by one, until the deadline; then the disturbed cells again."""
    sweep = bench.sweep
    for batch, length in cells(sweep):
        if cell_key(batch, length) in keys and not measure_into(bench, stepper, batch, length):
            return
    beside(bench, stepper, keys)
    for _ in range(MOST_REPEATS):
        for batch, length in doubtful(bench.record):
            if not measure_into(bench, stepper, batch, length):
                return


def measure_into(bench: Bench, stepper: Stepper, batch: int, length: int) -> bool:
    """One cell into the record, the quieter where it is there already. False, nothing done, without the time for it."""
    sweep, record, block = bench.sweep, bench.record, stepper.block_size
    bench.doing = key = cell_key(batch, length)
    capacity, needed = stepper.num_blocks * block, kv_tokens_needed(batch, length + sweep.max_steps // 2 + 4, block)
    if needed > capacity:
        cell: Record = {"status": "skipped: kv", "needed_tokens": needed, "kv_tokens": capacity}
    elif not bench.has_time():
        return False
    else:
        is_filled = sweep.context == "filled"
        cell = {"status": "ok", **measure_cell(stepper, sweep, batch, length, is_filled=is_filled)}
        cell |= {"engine": len(record["engines"]) - 1, "measured_at": now()}
        old = record["cells"].get(key, {})
        cell = quieter(old, cell) if old.get("status") == "ok" else cell
    record["cells"][key] = cell
    bench.write()
    again = f" (again, {cell['repeats']})" if "repeats" in cell else ""
    print(f"{bench.spec.stem} {key}: {cell.get('step_ms', cell['status'])}{again}", flush=True)
    return True


def beside(bench: Bench, stepper: Stepper, keys: set[str]) -> None:
    """Measure what is measured once per engine: the parts of a step, prefill, the two kinds of context."""
    sweep, record, spec = bench.sweep, bench.record, bench.spec
    for batch in sweep.breakdown:
        bench.doing = f"breakdown/{batch}"
        if bench.doing in keys and bench.has_time():
            record["breakdown"][str(batch)] = measure_breakdown(stepper, sweep, batch)
            bench.write()
    bench.doing = "prefill"
    if bench.doing in keys and bench.has_time(5):
        record["prefill"] = measure_prefill(stepper, sweep)
        bench.write()
    bench.doing = "pair"
    if bench.doing in keys and bench.has_time(10):
        pair = next(pair for pair in sweep.pairs if (pair.size, pair.precision) == (spec.size, spec.precision))
        record["pair"] = {"batch": pair.batch, "length": pair.length} | {
            kind: measure_cell(stepper, sweep, pair.batch, pair.length, is_filled=kind == "filled")
            for kind in ("filled", "prefilled")
        }
        bench.write()


if __name__ == "__main__":
    main()
