"""Forward and backward of decoder layers in the FP8 flow against bf16, at one size and number of tokens.

    python -m harness.devtools.bench.fp8_layers [--size 7b] [--tokens 8192] [--length 1024] [--out FILE] [--quick]
    python -m harness.devtools.bench.fp8_layers --size toy --device cpu --tokens 256 --length 128

    bf16                 weights and gradients in bf16: nothing but the products
    bf16, fp32 masters   float32 weights and gradients, cast at every use, as autocast casts them
    fp8, NAME            float32 weights, quantized at every use; gradients float32
    fp8 held, NAME       the same behind the first micro-batch of a step: weights are quantized already
    ..., compiled        as runs compile their layers (`trainers.compiling`), for one shape

NAME is who multiplies (`flow_kernels.NAMES`, "emulated"); "square" is a variant of the flow: "errors" tells its error.
A layer of a run differs: float32 between its products, q, k and v and gate and up apart (--separate has the latter).
Contestants take turns in one run; CUDA events, medians. "issue_ms" is the CPU's time to launch a step: what lies above
the GPU's is bound by launches, and "graphs" replays steps without them. "products" times each product alone,
"quantizers" each quantizer alone by launch; layers use the fastest. Bar: an FP8 layer that holds its weights is at
least 1.45 times as fast as "bf16"; "x_compiled" is against "bf16, compiled".

Each part has its share of --seconds (165; 55 with --quick, which times quantizers and one eager FP8 layer alone); what
does not fit is named; a contestant that fails loses alone. --out is written after every part, and at an interruption.
Left out: the optimizer, the head and the rollout.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from harness.devtools.bench.fp8_layers_parts import Row, error_rows, product_rows, quantizer_rows
from harness.devtools.bench.fp8_layers_report import best_launch, summary, table
from harness.devtools.bench.fp8_layers_steps import graph_rows, layer_rows, lineup
from harness.devtools.bench.sync import _triton
from harness.devtools.bench.sync_model import SIZES
from harness.foundation.provenance import commit, cpu_name, packages
from harness.numerics.fp8_gemm import Kernels
from harness.records.run_result import write_atomic

REPEATS = 15
SECONDS, QUICK_SECONDS = 165, 55
ENDS = {"quantizers": 0.25, "layers": 0.7, "products": 0.92, "errors": 0.94, "graphs": 1.0}
"""Part -> when it ends at the latest, as a share of all the time."""
QUICK_ENDS = {"quantizers": 0.5, "layers": 0.95, "errors": 1.0}


def available(device: str, launch: str | None = None) -> dict[str, Kernels | None]:
    """Who can multiply here, by name, quantizing as `launch` says; None: emulated."""
    if device == "cpu":
        return {"emulated": None}
    from harness.kernels import fp8_flow

    if fp8_flow.best(torch.device(device)) is None:
        raise ValueError("--device is cuda, but its FP8 products need a Hopper GPU (compute capability 9.0)")
    has_deep_gemm = fp8_flow.has_deep_gemm()
    names = [name for name in fp8_flow.NAMES if has_deep_gemm or name == "scaled_mm"]
    return {name: fp8_flow.kernels_named(name, launch) for name in names}


def header(given: argparse.Namespace) -> Row:
    """What was asked for, and where. Raises ValueError for what does not fit the size or the device."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device; choose cpu")
    if given.length < 1 or given.tokens % given.length:
        raise ValueError(f"--length is {given.length}; it must divide --tokens, which is {given.tokens}")
    if given.seconds <= 0:
        raise ValueError(f"--seconds is {given.seconds}; it must be more than 0")
    names = ("size", "tokens", "length", "separate", "eager", "repeats", "quick", "seconds")
    return {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else cpu_name(),
        "commit": commit()[0], "packages": packages() | {"triton": _triton()}, "cut": [], "is_whole": False,
        "deep": given.layers,
        **{name: getattr(given, name) for name in names},
    }  # fmt: skip


def measure(given: argparse.Namespace, found: Row, save: Callable[[], None]) -> None:
    """Fill `found` part by part, saving after each; a part that runs out of time is named in "cut"."""
    shape, device, began = SIZES[given.size], given.device, time.monotonic()
    who, launch = available(device), None
    for name, share in (QUICK_ENDS if given.quick else ENDS).items():
        until = began + share * given.seconds
        rows: Iterator[Row] = iter(())
        if name == "quantizers" and device != "cpu":
            rows = quantizer_rows(shape, given)
        elif name == "layers":
            launch = best_launch(found["quantizers"])
            who = available(device, launch)
            rows = layer_rows(shape, given, lineup(who, given), until)
        elif name == "products":
            rows = product_rows(shape, given, who)
        elif name == "errors":
            rows = error_rows(device)
        elif name == "graphs" and device != "cpu":
            rows = graph_rows(shape, given, lineup(who, given), found["layers"])
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = []
        collect(found, name, rows, until)
        save()
        if device == "cuda":
            torch.cuda.empty_cache()
    found["launch"], found["is_whole"] = launch, not found["cut"]


def collect(found: Row, name: str, rows: Iterator[Row], until: float) -> None:
    """Rows into `found[name]` until they or the time end."""
    for row in rows:
        found[name].append(row)
        if time.monotonic() > until and name != "layers":  # layers look at the time themselves
            found["cut"].append(name)
            return


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables, the short one last; write the JSON where asked. 130: interrupted."""
    given = arguments(words)
    found: Row = {}

    def save() -> None:
        if given.out is not None and found:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(given.out, json.dumps(found, indent=1, allow_nan=False).encode() + b"\n")

    before, code = signal.signal(signal.SIGTERM, signal.default_int_handler), 0
    try:
        found |= header(given)
        measure(given, found, save)
    except KeyboardInterrupt:
        print("fp8_layers: interrupted; what follows is not whole", file=sys.stderr)
        code = 130
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"fp8_layers: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
        save()
    for name in ENDS:
        if found.get(name):
            print(f"\n{name}\n{table(found[name])}")
    print(f"\n{found['size']}, {found['tokens']} tokens in sequences of {found['length']}, on {found['device']}")
    print(table(summary(found)))
    return code


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.devtools.bench.fp8_layers")
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=1024, help="of a sequence, which attention does not leave")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--separate", action="store_true", help="q, k, v, gate and up each as a product of its own")
    parser.add_argument("--eager", action="store_true", help="nothing through torch.compile")
    parser.add_argument("--quick", action="store_true", help="quantizers and one eager FP8 layer alone, in a minute")
    parser.add_argument("--seconds", type=float, help=f"for all, {SECONDS} ({QUICK_SECONDS} with --quick)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.seconds is None:
        given.seconds = QUICK_SECONDS if given.quick else SECONDS
    return given


if __name__ == "__main__":
    sys.exit(main())
