"""Forward and backward of decoder layers in the FP8 flow against bf16, at one size and number of tokens.

    python -m harness.devtools.bench fp8_layers [--size 7b] [--tokens 8192] [--length 1024] [--out FILE] [--quick]
    python -m harness.devtools.bench fp8_layers --size toy --device cpu --tokens 256 --length 128

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
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from harness.devtools.bench import runner
from harness.devtools.bench.fp8_layers_model import graph_rows, layer_rows, lineup
from harness.devtools.bench.fp8_layers_parts import PLAIN, Row, error_rows, product_rows, quantizer_rows
from harness.devtools.bench.runner import add_device_and_out, check_device, save, table
from harness.devtools.bench.sync import triton_version
from harness.devtools.bench.sync_model import SIZES
from harness.foundation.provenance import commit, cpu_name, packages
from harness.numerics.fp8_gemm import Kernels

REPEATS = 15
SECONDS, QUICK_SECONDS = 165, 55
ENDS = {"quantizers": 0.25, "layers": 0.7, "products": 0.92, "errors": 0.94, "graphs": 1.0}
"""Part -> when it ends at the latest, as a share of all the time."""
QUICK_ENDS = {"quantizers": 0.5, "layers": 0.95, "errors": 1.0}


def available(device: str, launch: str | None = None) -> dict[str, Kernels | None]:
    """Kernels that can multiply here, by name, quantizing as `launch` says; None: emulated."""
    if device == "cpu":
        return {"emulated": None}
    from harness.kernels import fp8_flow

    if fp8_flow.best(torch.device(device)) is None:
        raise ValueError("--device is cuda, but its FP8 products need a Hopper GPU (compute capability 9.0)")
    has_deep_gemm = fp8_flow.has_deep_gemm()
    names = [name for name in fp8_flow.NAMES if has_deep_gemm or name == "scaled_mm"]
    return {name: fp8_flow.kernels_named(name, launch) for name in names}


def header(given: argparse.Namespace) -> Row:
    """The options of a run and its place. Raises ValueError for what does not fit the size or the device."""
    check_device(given.device)
    if given.length < 1 or given.tokens % given.length:
        raise ValueError(f"--length is {given.length}; it must divide --tokens, which is {given.tokens}")
    if given.seconds <= 0:
        raise ValueError(f"--seconds is {given.seconds}; it must be more than 0")
    names = ("size", "tokens", "length", "separate", "eager", "repeats", "quick", "seconds")
    return {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else cpu_name(),
        "commit": commit()[0], "packages": packages() | {"triton": triton_version()}, "cut": [], "is_whole": False,
        "deep": given.layers,
        **{name: getattr(given, name) for name in names},
    }  # fmt: skip


def measure(given: argparse.Namespace, found: Row) -> None:
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
        save(given.out, found)
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


def best_launch(quantizers: Sequence[Row]) -> str | None:
    """The launch that is fastest over the uses that most launches were timed at; None where none was."""
    times: dict[str, dict[tuple[str, int], float]] = {}
    for row in quantizers:
        if row["ms"] is not None:
            times.setdefault(row["launch"], {})[row["quantizer"], row["width"]] = row["ms"]
    uses = {use for found in times.values() for use in found}
    most = max((sum(use in found for found in times.values()) for use in uses), default=0)
    shared = {use for use in uses if sum(use in found for found in times.values()) == most}
    whole = {launch: found for launch, found in times.items() if shared <= set(found)}
    return min(whole, key=lambda launch: sum(whole[launch][use] for use in shared), default=None)


def best_wgrad(products: Sequence[Row]) -> dict[str, float]:
    """Kernel of WGrad -> ms of the layer's products together, of those that were timed at all; fastest first."""
    sums: dict[str, list[float]] = {}
    for row in products:
        if row["product"] == "WGrad" and row["ms"] is not None:
            sums.setdefault(row["what"], []).append(row["ms"])
    most = max(map(len, sums.values()), default=0)
    return dict(sorted(((who, sum(ms)) for who, ms in sums.items() if len(ms) == most), key=lambda item: item[1]))


def budget(found: Row) -> list[Row]:
    """Parts of the milliseconds of "bf16" and of the fastest faithful FP8 layer, by what was timed alone."""
    layers = {row["what"]: row["ms"] for row in found.get("layers", ()) if row.get("ms")}
    held = {name: ms for name, ms in layers.items() if name.startswith("fp8 held") and "square" not in name}
    chosen, rows = [name for name in (PLAIN, *sorted(held, key=held.__getitem__)[:1]) if name in layers], []
    for name in chosen:
        products = _products(found.get("products", ()), is_bf16=name == PLAIN)
        quantizers = 0.0 if name == PLAIN else _quantizers(found.get("quantizers", ()), found.get("launch"))
        if products is None or quantizers is None:
            continue
        rows += [{"what": name, "of which": part, "ms": ms} for part, ms in (
            ("products", products), ("quantizers", quantizers),
            ("attention and the rest", layers[name] / found["deep"] - products - quantizers)) if ms]  # fmt: skip
    return rows


def _products(rows: Sequence[Row], *, is_bf16: bool) -> float | None:
    """One layer's, each by the fastest that is no variant; None where one is missing."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["ms"] is not None and (row["what"] == PLAIN) == is_bf16 and not row["what"].startswith("square"):
            key = row["layer"], row["product"]
            best[key] = min(row["ms"], best.get(key, row["ms"]))
    return sum(best.values()) if len(best) == 12 else None


def _quantizers(rows: Sequence[Row], launch: str | None) -> float | None:
    """One layer's; None where one is missing."""
    found = [row for row in rows if row["launch"] == launch and row["times"]]
    if not found or any(row["ms"] is None for row in found):
        return None
    return sum(row["ms"] * row["times"] for row in found)


def summary(found: Row) -> list[Row]:
    """The short table: what was best, and by how much."""
    rows: list[Row] = []
    if launch := best_launch(found.get("quantizers", ())):
        rows.append({"best": "launch of the quantizers", "is": launch})
    for who, ms in list(best_wgrad(found.get("products", ())).items())[:3]:
        rows.append({"best": "WGrad of all products", "is": who, "ms": ms})
    timed = [row for row in found.get("layers", ()) if row.get("ms")]
    for what, start in (("layer", "bf16"), ("layer", "fp8"), ("graph of a layer", "")):
        chosen = (
            timed if start else [row | {"ms": row["graph_ms"]} for row in found.get("graphs", ()) if row["graph_ms"]]
        )
        for row in sorted((row for row in chosen if row["what"].startswith(start)), key=lambda row: row["ms"])[:4]:
            rows.append({"best": what, "is": row["what"], **{name: row.get(name) for name in
                        ("ms", "x_bf16", "x_compiled", "output_error", "grad_error")}})  # fmt: skip
    failed = [row for part in ("layers", "products", "quantizers", "graphs") for row in found.get(part, ())
              if row.get("failed")]  # fmt: skip
    rows += [
        {"best": "failed", "is": f"{row.get('what') or row.get('quantizer')}: {row['failed']}"} for row in failed[:6]
    ]
    rows += [{"best": "cut by the time", "is": name} for name in found.get("cut", ())]
    return [*rows, *({"best": row["what"], "is": row["of which"], "ms": row["ms"]} for row in budget(found))] or [
        {"best": "nothing was timed"}
    ]


def command(given: argparse.Namespace) -> int:
    """Print the tables, the short one last; write the JSON where asked. 130: interrupted."""
    if given.seconds is None:
        given.seconds = QUICK_SECONDS if given.quick else SECONDS
    found, code = header(given), 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(given, found)
    except KeyboardInterrupt:
        print("fp8_layers: interrupted; what follows is not whole", file=sys.stderr)
        code = 130
    finally:
        signal.signal(signal.SIGTERM, before)
        save(given.out, found)
    for name in ENDS:
        if found.get(name):
            print(f"\n{name}\n{table(found[name])}")
    print(f"\n{found['size']}, {found['tokens']} tokens in sequences of {found['length']}, on {found['device']}")
    print(table(summary(found)))
    return code


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser)
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=1024, help="of a sequence, which attention does not leave")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--separate", action="store_true", help="q, k, v, gate and up each as a product of its own")
    parser.add_argument("--eager", action="store_true", help="nothing through torch.compile")
    parser.add_argument("--quick", action="store_true", help="quantizers and one eager FP8 layer alone, in a minute")
    parser.add_argument("--seconds", type=float, help=f"for all, {SECONDS} ({QUICK_SECONDS} with --quick)")
    parser.add_argument("--repeats", type=int, default=REPEATS)


def main(words: Sequence[str] | None = None) -> int:
    """0, 2 for bad input, 130 where it was interrupted."""
    return runner.run("fp8_layers", __doc__ or "", options, command, words)
