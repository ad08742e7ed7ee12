"""A colocated weight sync of one model on one GPU: quantize every linear layer and write the engine's buffers.

    python -m harness.devtools.bench sync [--size 7b] [--device cuda] [--out sync.json]
    python -m harness.devtools.bench sync --size toy --device cpu

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
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor

from harness.devtools.bench import runner, sync_verl
from harness.devtools.bench.runner import add_device_and_out, check_device, save
from harness.devtools.bench.sync_model import SIZES, EngineBuffers, engine_for, packed, trainer_weights
from harness.devtools.bench.timing import device_seconds, in_turns
from harness.foundation.provenance import commit, cpu_name, packages
from harness.numerics.formats import format_named

WARM_UP, REPEATS, SWAPS = 2, 10, 20
TIMED = ("e4m3_block", "e4m3_channel", "int8_channel", "int4_g128", "nvfp4")
"""Formats that our kernels are timed in; the other contestants take part in the first alone."""
LIMIT, OWN, GRAPH, TORCH = "device copy of the same bytes", "own kernels", "own, one CUDA graph", "torch reference"
BUCKETS = "behind its buckets"


def copy_plain(engine: EngineBuffers) -> None:
    """Copy what is not quantized, in as few launches as torch needs."""
    targets, sources = [target for _, target in engine.plain], [source for source, _ in engine.plain]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def own(engine: EngineBuffers) -> None:
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


def reference(engine: EngineBuffers) -> None:
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
    return {
        "grown_bytes": torch.cuda.memory_allocated() - before,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


def wrong_codes(engine: EngineBuffers, call: Callable[[], object], rule: str) -> float:
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


def contestants(engine: EngineBuffers, device: str, is_first: bool) -> dict[str, Callable[[], object]]:
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


def measure(engine: EngineBuffers, device: str, is_first: bool, repeats: int) -> list[dict[str, Any]]:
    """One row per contestant."""
    calls = contestants(engine, device, is_first)
    times = in_turns(calls, partial(device_seconds, device=device), WARM_UP, repeats)
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
    check_device(device)
    if repeats < 1:
        raise ValueError(f"--repeats: {repeats}; valid: >= 1")
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
        "commit": commit()[0], "packages": packages() | {"triton": triton_version(), "verl": sync_verl.version()},
        "repeats": repeats,
        "swaps": SWAPS, "num_bytes": num_bytes, "rows": rows,
    }  # fmt: skip


def triton_version() -> str:
    """Version of the installed Triton, or "not installed"."""
    return version("triton") if importlib.util.find_spec("triton") else "not installed"


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser)
    parser.add_argument("--size", default="7b", choices=sorted(SIZES))
    parser.add_argument("--repeats", type=int, default=REPEATS)


def command(given: argparse.Namespace) -> int:
    """Print the table; write the JSON where asked."""
    found = run(given.size, given.device, given.repeats)
    print(f"{found['size']} on {found['device']}, median of {found['repeats']}; verl: {found['packages']['verl']}")
    columns = ("format", "what", "ms", "x_limit", "x_own", "gb_per_s", "wrong_codes", "peak_bytes", "grown_bytes")
    print(runner.table([{name: row[name] for name in columns} for row in found["rows"]]))
    save(given.out, found)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench; its exit code: 0, or 2 for bad input."""
    return runner.run("sync", __doc__ or "", options, command, words)
