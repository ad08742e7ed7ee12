"""Forward and backward of decoder layers in the FP8 flow against bf16, at one size and number of tokens.

    python -m harness.bench.fp8_layers [--size 7b] [--tokens 8192] [--length 1024] [--out fp8_layers.json]
    python -m harness.bench.fp8_layers --size toy --device cpu --tokens 256 --length 128

    bf16                 weights and gradients in bf16: nothing but the products
    bf16, fp32 masters   float32 weights and gradients, cast at every use, as autocast casts them
    fp8, NAME            float32 weights, quantized at every use; gradients float32
    fp8 held, NAME       the same behind the first micro-batch of a step: weights are quantized already

NAME is who multiplies (`flow_kernels.NAMES`, "emulated"). Contestants take turns in one run; CUDA events, medians.
"products" times each product alone, "quantizers" each quantizer alone. Bar: "fp8 held" is at least 1.45 times as fast
as "bf16". The optimizer, the head and the rollout are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from harness.bench.fp8_layers_model import Layer, Make, makers, pieces
from harness.bench.sync import _triton, seconds
from harness.bench.sync_model import SIZES, Shape
from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import held_weights, use_kernels
from harness.numerics.fp8_gemm import Kernels
from harness.provenance import commit, cpu_name, packages
from harness.results import write_atomic

WARM_UP, REPEATS = 3, 15
BAR = 1.45
PLAIN = "bf16"
Row = dict[str, Any]


def available(device: str) -> dict[str, Kernels | None]:
    """Who can multiply here, by name; None: emulated."""
    if device == "cpu":
        return {"emulated": None}
    from harness.engines.vllm import flow_kernels

    if flow_kernels.best(torch.device(device)) is None:
        raise ValueError("--device is cuda, but its FP8 products need a Hopper GPU (compute capability 9.0)")
    names = flow_kernels.NAMES if flow_kernels.has_deep_gemm() else ("scaled_mm",)
    return {name: flow_kernels.kernels_named(name) for name in names}


def medians(calls: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, list[float]]:
    """Contestant -> seconds of its measured calls; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + repeats):
        for name, call in calls.items():
            spent = seconds(call, device)
            if turn >= WARM_UP:
                times[name].append(spent)
    return times


def step(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """One micro-batch, forward and backward, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).backward(dy)


def layer_rows(shape: Shape, device: str, given: argparse.Namespace, who: dict[str, Kernels | None]) -> list[Row]:
    """Layers as a whole. One model per contestant, all of them alive."""
    parts, make = pieces(given.compiled), makers(device)
    x, dy = (torch.randn(given.tokens, shape.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def model(linears: Make, kernels: Kernels | None) -> nn.Module:
        options = {"is_fused": not given.separate, "length": given.length, "device": device}
        found = nn.Sequential(*(Layer(shape, linears, parts, **options) for _ in range(given.layers)))
        use_kernels(found, kernels)
        return found

    with ExitStack() as held:
        models = {name: model(make[name], None) for name in (PLAIN, "bf16, fp32 masters")}
        for name, kernels in who.items():
            models[f"fp8, {name}"] = model(make["fp8"], kernels)
            if kernels is not None:
                models[f"fp8 held, {name}"] = model(make["fp8"], kernels)
                held.enter_context(held_weights(models[f"fp8 held, {name}"]))
        calls: dict[str, Callable[[], object]] = {name: partial(step, m, x, dy) for name, m in models.items()}
        both = medians(calls, device, given.repeats)
        with torch.no_grad():
            forward = medians({name: partial(m, x) for name, m in models.items()}, device, given.repeats)
        apart = {name: _apart(m(x), models[PLAIN](x)) for name, m in models.items()}
    plain = median(both[PLAIN]), median(forward[PLAIN])
    return [{
        "what": name, "ms": median(times) * 1e3, "ms_min": min(times) * 1e3, "ms_max": max(times) * 1e3,
        "x_bf16": plain[0] / median(times), "forward_ms": median(forward[name]) * 1e3,
        "forward_x_bf16": plain[1] / median(forward[name]), "tokens_per_s": given.tokens / median(times),
        "output_error": apart[name], "bar": BAR if name.startswith("fp8 held") else None,
    } for name, times in both.items()]  # fmt: skip


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def sides(shape: Shape, is_separate: bool) -> dict[str, tuple[int, int]]:
    """Linear layer -> (N, K)."""
    heads, pair = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    first = {"q": (heads, shape.hidden), "k": (pair, shape.hidden)} if is_separate else {
        "qkv": (heads + 2 * pair, shape.hidden)}  # fmt: skip
    up = {"gate": (shape.intermediate, shape.hidden)} if is_separate else {
        "gate_up": (2 * shape.intermediate, shape.hidden)}  # fmt: skip
    return first | {"o": (shape.hidden, heads)} | up | {"down": (shape.hidden, shape.intermediate)}


def product_rows(shape: Shape, device: str, given: argparse.Namespace, who: dict[str, Kernels | None]) -> list[Row]:
    """Each product of each linear layer alone, on operands that are quantized already."""
    rows: list[Row] = []
    acts, weights = format_named("e4m3_1x128"), format_named("e4m3_block")
    for name, (n, k) in sides(shape, given.separate).items():
        x, dy, w = (torch.randn(*size, device=device, dtype=torch.bfloat16)
                    for size in ((given.tokens, k), (given.tokens, n), (n, k)))  # fmt: skip
        calls: dict[str, dict[str, Callable[[], object]]] = {
            "FProp": {PLAIN: partial(torch.mm, x, w.t())},
            "DGrad": {PLAIN: partial(torch.mm, dy, w)},
            "WGrad": {PLAIN: partial(torch.mm, dy.t(), x)},
        }
        for who_name, kernels in who.items():
            if kernels is None or who_name == "mixed":
                continue
            both = {"has_rows": True, "has_columns": True}
            (xr, xc), (dr, dc) = (kernels.runs(t, acts, is_twice=False, **both) for t in (x, dy))
            plain, turned = kernels.weight(w, weights)
            assert xr is not None and xc is not None and dr is not None and dc is not None
            calls["FProp"][who_name] = partial(kernels.by_tiles, xr, plain)
            calls["DGrad"][who_name] = partial(kernels.by_tiles, dr, turned)
            calls["WGrad"][who_name] = partial(kernels.by_runs, dc, xc)
        for product, contestants in calls.items():
            times = {who_name: median(t) for who_name, t in medians(contestants, device, given.repeats).items()}
            rows += [{"layer": name, "product": product, "what": who_name, "ms": spent * 1e3,
                      "tflops": 2e-12 * given.tokens * n * k / spent, "x_bf16": times[PLAIN] / spent}
                     for who_name, spent in times.items()]  # fmt: skip
    return rows


def quantizer_rows(shape: Shape, given: argparse.Namespace, who: dict[str, Kernels | None]) -> list[Row]:
    """Each quantizer alone, and the bytes that it must move a second."""
    kernels, device = next(iter(who.values())), given.device
    if kernels is None:
        return []
    acts, weights = format_named("e4m3_1x128"), format_named("e4m3_block")

    def calls() -> Iterator[tuple[str, int, Callable[[], object], float]]:
        for width in sorted({size for pair in sides(shape, given.separate).values() for size in pair}):
            x = torch.randn(given.tokens, width, device=device, dtype=torch.bfloat16)
            for what, rows, columns, twice in (("rows", True, False, False), ("both", True, True, False),
                                               ("both, twice rounded", True, True, True)):  # fmt: skip
                run = partial(kernels.runs, x, acts, has_rows=rows, has_columns=columns, is_twice=twice)
                yield what, width, run, x.numel() * (2.0 + rows + columns)
        for n, k in sides(shape, given.separate).values():
            for dtype in (torch.float32, torch.bfloat16):
                w = torch.randn(n, k, device=device, dtype=dtype)
                yield f"weight, {dtype}"[:20], n * k, partial(kernels.weight, w, weights), w.numel() * (
                    w.element_size() + 2.0)  # fmt: skip

    rows: list[Row] = []
    for what, size, run, num_bytes in calls():
        spent = median(medians({what: run}, device, given.repeats)[what])
        rows.append({"quantizer": what, "size": size, "ms": spent * 1e3, "gb_per_s": num_bytes / spent / 1e9})
    return rows


def measure(given: argparse.Namespace) -> Row:
    """Everything, as JSON. Raises ValueError for what does not fit the size or the device."""
    shape, device = SIZES[given.size], given.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device; choose cpu")
    if given.length < 1 or given.tokens % given.length:
        raise ValueError(f"--length is {given.length}; it must divide --tokens, which is {given.tokens}")
    who = available(device)
    found: Row = {
        "size": given.size, "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "commit": commit()[0], "packages": packages() | {"triton": _triton()},
        **{name: getattr(given, name) for name in ("tokens", "length", "layers", "separate", "compiled", "repeats")},
    }  # fmt: skip
    for name, rows in (("quantizers", partial(quantizer_rows, shape, given, who)),
                       ("products", partial(product_rows, shape, device, given, who)),
                       ("layers", partial(layer_rows, shape, device, given, who))):  # fmt: skip
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = rows()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def table(rows: list[Row]) -> str:
    """Rows as text, in columns."""
    columns = list(rows[0])
    cells = [columns, *([_text(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables; write the JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.fp8_layers", description="FP8 decoder layers")
    parser.add_argument("--size", default="7b", choices=sorted(SIZES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--separate", action="store_true", help="q, k, v, gate and up each as a product of its own")
    parser.add_argument("--compiled", action="store_true", help="norms, rotation and SwiGLU by torch.compile")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        found = measure(given)
    except (ValueError, torch.OutOfMemoryError) as error:
        print(f"fp8_layers: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{found['size']}, {found['tokens']} tokens in sequences of {found['length']}, on {found['device']}")
    for name in ("quantizers", "products", "layers"):
        if found[name]:
            print(f"\n{name}\n{table(found[name])}")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(given.out, json.dumps(found, indent=1, allow_nan=False).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
