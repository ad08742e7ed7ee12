"""A colocated weight sync of one model on one GPU: quantize every linear layer and write the engine's buffers.

    python -m harness.devtools.bench.sync [--size 7b] [--device cuda] [--out sync.json]
    python -m harness.devtools.bench.sync --size toy --device cpu

bf16 weights of the trainer -> codes and scales in preallocated fused buffers (qkv, o, gate_up, down), and plain copies
of embedding, head, norms and biases. All contestants of a format take turns in one run; CUDA events, medians.
The limit is a device copy that reads and writes, together, as many bytes as the sync must. "one CUDA graph": the same
launches recorded once, for a trainer whose weights stay where they are.
verl's rows are its own kernel and the loader's copies, and the same behind the copy of every tensor into its
transport's buffer with a device synchronisation on both sides of a bucket; `sync_verl.py` says what is left out.
The engine itself (names, loaders, post-processing, processes) is left out on every side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from harness.devtools.bench import sync_verl
from harness.devtools.bench.sync_model import SIZES, Engine, engine_for, packed, trainer_weights
from harness.foundation.provenance import commit, cpu_name, packages
from harness.numerics.formats import format_named
from harness.records.run_result import write_atomic

WARM_UP, REPEATS, SWAPS = 2, 10, 20
TIMED = ("e4m3_block", "e4m3_channel", "int8_channel", "int4_g128", "nvfp4")
"""What our kernels are timed in; the other contestants take part in the first alone."""
LIMIT, OWN, GRAPH, TORCH = "device copy of the same bytes", "own kernels", "own, one CUDA graph", "torch reference"
BUCKETS = "behind its buckets"


def copy_plain(engine: Engine) -> None:
    """What is not quantized, in as few launches as torch needs."""
    targets, sources = [target for _, target in engine.plain], [source for source, _ in engine.plain]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def own(engine: Engine) -> None:
    """One launch per tensor; NVFP4 needs a pass for the largest magnitude of each fused matrix before."""
    from harness.kernels.quantize import kind, quantize_into, tensor_level, update_amax

    level: Tensor | None = None
    if kind(engine.fmt) in ("nvfp4", "tensor"):
        engine.amax.zero_()
        for i, group in enumerate(engine.groups):
            for part in group:
                update_amax(part.w, engine.amax[i], base=torch.bfloat16)
        level = tensor_level(engine.amax, engine.fmt)
    for i, group in enumerate(engine.groups):
        of_group = None if level is None else level[i]
        for part in group:
            quantize_into(part.w, engine.fmt, part.out, part.scale, base=torch.bfloat16, level=of_group)
    copy_plain(engine)


def reference(engine: Engine) -> None:
    """`quantize` of every tensor in torch, then the copy."""
    for part in engine.parts():
        codes, scale = packed(part.w, engine.fmt)
        part.out.copy_(codes)
        part.scale.copy_(scale)
    copy_plain(engine)


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """`call` recorded as one CUDA graph; everything it launches must have been compiled before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds(call: Callable[[], object], device: str) -> float:
    """One call: device time between two CUDA events, or wall time on a CPU."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def in_turns(
    calls: Mapping[str, Callable[[], object]], device: str, warm_up: int, repeats: int, until: float = float("inf")
) -> dict[str, list[float]]:
    """Contestant -> seconds of its measured calls; they take turns until `repeats` or `until` of the monotonic clock,
    but once at least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            spent = seconds(call, device)
            if turn >= warm_up:
                times[name].append(spent)
        if turn >= warm_up and time.monotonic() > until:
            break
    return times


def memory(call: Callable[[], object], device: str) -> dict[str, int | None]:
    """Over SWAPS calls: bytes still allocated that were not before, and the most allocated meanwhile beyond that."""
    if device == "cpu":
        return {"grown_bytes": None, "peak_bytes": None}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(SWAPS):
        call()
    torch.cuda.synchronize()
    return {"grown_bytes": torch.cuda.memory_allocated() - before,
            "peak_bytes": torch.cuda.max_memory_allocated() - before}  # fmt: skip


def wrong_codes(engine: Engine, call: Callable[[], object], rule: str) -> float:
    """Share of the first layer's bytes of codes that are not the reference's under `rule`, after one call."""
    groups = engine.groups[:4]
    for part in (part for group in groups for part in group):
        part.out.view(torch.uint8).fill_(0x5A)
    call()
    wrong = total = 0
    for group in groups:
        codes, _ = packed(torch.cat([part.w for part in group]), format_named(rule))
        written = torch.cat([part.out.view(torch.uint8) for part in group])
        wrong += int((codes.view(torch.uint8) != written).sum())
        total += written.numel()
    return wrong / total


def contestants(engine: Engine, device: str, is_first: bool) -> dict[str, Callable[[], object]]:
    """Name -> one sync. `is_first`: with everybody else's way beside ours."""
    found: dict[str, Callable[[], object]] = {}
    half = engine.num_bytes() // 2
    source, target = (torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2))
    found[LIMIT] = partial(target.copy_, source)
    if device == "cuda":
        found[OWN] = partial(own, engine)
        found[GRAPH] = graph_of(found[OWN])
    if is_first:
        found[TORCH] = partial(reference, engine)
    if is_first and device == "cuda":
        to_fp8, which = sync_verl.quantizer(), f"verl {sync_verl.version()}"
        if to_fp8 is not None:
            bucket = torch.empty(sync_verl.BUCKET, dtype=torch.uint8, device=device)
            found[which] = partial(sync_verl.swap, engine, to_fp8, None)
            found[f"{which}, {BUCKETS}"] = partial(sync_verl.swap, engine, to_fp8, bucket)
    return found


def measure(engine: Engine, device: str, is_first: bool, repeats: int) -> list[dict[str, Any]]:
    """One row per contestant."""
    calls = contestants(engine, device, is_first)
    times = in_turns(calls, device, WARM_UP, repeats)
    limit = median(times[LIMIT])
    rows: list[dict[str, Any]] = []
    for name, call in calls.items():
        rule = "e4m3_block_verl" if name.startswith("verl") else engine.fmt.name
        rows.append({
            "format": engine.fmt.name, "what": name, "ms": median(times[name]) * 1e3,
            "ms_min": min(times[name]) * 1e3, "ms_max": max(times[name]) * 1e3, "x_limit": median(times[name]) / limit,
            "x_own": median(times[name]) / median(times[OWN]) if OWN in times else None,
            "gb_per_s": engine.num_bytes() / median(times[name]) / 1e9,
            "wrong_codes": None if name == LIMIT else wrong_codes(engine, call, rule), **memory(call, device),
        })  # fmt: skip
    return rows


def run(size: str, device: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Everything that is measured, as JSON. Raises ValueError where the device is not there or `repeats` < 1."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device; choose cpu")
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; it must be at least 1")
    groups, plain = trainer_weights(SIZES[size], device)
    rows: list[dict[str, Any]] = []
    num_bytes: dict[str, int] = {}
    for i, name in enumerate(TIMED if device == "cuda" else TIMED[:1]):
        print(f"{name} ...", file=sys.stderr, flush=True)
        engine = engine_for(groups, plain, format_named(name))
        num_bytes[name] = engine.num_bytes()
        rows += measure(engine, device, i == 0, repeats)
        del engine
        if device == "cuda":
            torch.cuda.empty_cache()
    return {
        "size": size, "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "commit": commit()[0], "packages": packages() | {"triton": _triton(), "verl": sync_verl.version()},
        "repeats": repeats,
        "swaps": SWAPS, "num_bytes": num_bytes, "rows": rows,
    }  # fmt: skip


def _triton() -> str:
    return version("triton") if importlib.util.find_spec("triton") else "not installed"


def table(found: dict[str, Any]) -> str:
    """The rows as text."""
    columns = ("format", "what", "ms", "x_limit", "x_own", "gb_per_s", "wrong_codes", "peak_bytes", "grown_bytes")
    cells = [list(columns), *([_text(row[name]) for name in columns] for row in found["rows"])]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    head = f"{found['size']} on {found['device']}, median of {found['repeats']}; verl: {found['packages']['verl']}"
    return "\n".join([head, *lines])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; write the JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m harness.devtools.bench.sync", description="colocated weight sync")
    parser.add_argument("--size", default="7b", choices=sorted(SIZES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        found = run(given.size, given.device, given.repeats)
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"sync: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(table(found))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(given.out, json.dumps(found, indent=1, allow_nan=False).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
