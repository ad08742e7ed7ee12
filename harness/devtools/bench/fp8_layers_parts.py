"""The pieces of the FP8 layer benchmark, each alone: quantizers by launch, products by library, errors by variant."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from harness.devtools.bench.sync_model import Shape
from harness.devtools.bench.timing import device_seconds, in_turns
from harness.numerics.formats import format_named
from harness.numerics.fp8_gemm import Kernels, Operand, reference

WARM_UP = 3
PLAIN = "bf16"
MOVED = {"rows": 3.0, "both": 4.0, "twice": 4.0, "square": 4.0}
"""Bytes of a quantizer's input and output by element, each counted once."""
Row = dict[str, Any]
Call = Callable[[], object]
ACTS, WEIGHTS = "e4m3_1x128", "e4m3_block"


def failures() -> tuple[type[Exception], ...]:
    """Exceptions of a contestant that this device or these packages do not take: it loses, the others go on."""
    found: tuple[type[Exception], ...] = (RuntimeError, ValueError, ImportError, AttributeError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return found
    return (*found, TritonError)


def reason(error: Exception) -> str:
    """An error in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def medians(calls: dict[str, Call], device: str, repeats: int, until: float = float("inf")) -> dict[str, list[float]]:
    """`in_turns` with this bench's warm-up."""
    return in_turns(calls, partial(device_seconds, device=device), WARM_UP, repeats, until)


def sides(shape: Shape, is_separate: bool) -> dict[str, tuple[int, int]]:
    """Linear layer -> its (N, K), outputs and inputs."""
    heads, pair = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    first = {"q": (heads, shape.hidden), "k": (pair, shape.hidden)} if is_separate else {
        "qkv": (heads + 2 * pair, shape.hidden)}  # fmt: skip
    up = {"gate": (shape.intermediate, shape.hidden)} if is_separate else {
        "gate_up": (2 * shape.intermediate, shape.hidden)}  # fmt: skip
    return first | {"o": (shape.hidden, heads)} | up | {"down": (shape.hidden, shape.intermediate)}


def quantizer_rows(shape: Shape, given: argparse.Namespace) -> Iterator[Row]:
    """Each quantizer at its widths in a layer, by launch: ms, and the bytes that it must move a second."""
    from harness.kernels import fp8_flow

    for (what, width), times in uses(shape).items():
        is_tuned = not given.quick or what in ("both", "twice")
        for launch in fp8_flow.LAUNCHES if is_tuned else (fp8_flow.LAUNCH,):
            at = {"quantizer": what, "width": width, "times": times, "launch": launch}
            try:
                call = quantizer(what, width, given.tokens, given.device, launch)
                spent = median(medians({what: call}, given.device, given.repeats)[what])
            except failures() as error:
                yield at | {"ms": None, "gb_per_s": None, "failed": reason(error)}
                continue
            moved = given.tokens * width * MOVED[what]
            yield at | {"ms": spent * 1e3, "gb_per_s": moved / spent / 1e9, "failed": None}


def uses(shape: Shape) -> dict[tuple[str, int], int]:
    """(quantizer, width) -> how often one layer runs it; 0: it is timed for comparison."""
    heads, wide, hidden = shape.heads * shape.head_dim, shape.intermediate, shape.hidden
    entering = [("twice", width) for width in (hidden, heads, hidden, wide)]
    leaving = [("both", width) for width in (heads + 2 * shape.kv_heads * shape.head_dim, hidden, 2 * wide, hidden)]
    return dict(Counter([*entering, *leaving])) | {("square", wide): 0, ("rows", wide): 0}


def quantizer(what: str, width: int, tokens: int, device: str, launch: str) -> Call:
    """One call that quantizes Gaussian numbers [tokens, width]."""
    from harness.kernels import fp8_flow

    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    how = {"has_rows": True, "has_columns": what != "rows", "is_twice": what in ("twice", "square")}
    return partial(fp8_flow.quantize_runs, x, format_named(ACTS), is_square=what == "square", launch=launch, **how)


def product_rows(shape: Shape, given: argparse.Namespace, who: dict[str, Kernels | None]) -> Iterator[Row]:
    """Each product of each linear layer alone, on operands that are quantized already; the widest layer first."""
    own = {name: kernels for name, kernels in who.items() if kernels is not None and name != "mixed"}
    for layer, (n, k) in sorted(sides(shape, given.separate).items(), key=lambda item: -item[1][0] * item[1][1]):
        contests = contestants(n, k, given, own)
        for product, calls in contests.items():
            times: dict[str, float] = {}
            for name, call in calls.items():
                at = {"layer": layer, "product": product, "what": name}
                try:
                    times[name] = median(medians({name: call}, given.device, given.repeats)[name])
                except failures() as error:
                    yield at | {"ms": None, "tflops": None, "x_bf16": None, "failed": reason(error)}
                    continue
                yield at | {"ms": times[name] * 1e3, "tflops": 2e-12 * given.tokens * n * k / times[name],
                            "x_bf16": times[PLAIN] / times[name], "failed": None}  # fmt: skip


def contestants(n: int, k: int, given: argparse.Namespace, who: dict[str, Kernels]) -> dict[str, dict[str, Call]]:
    """Product -> contestant -> its call. FProp and DGrad differ between two libraries alone."""
    x, dy, w = (
        torch.randn(*size, device=given.device, dtype=torch.bfloat16)
        for size in ((given.tokens, k), (given.tokens, n), (n, k))
    )
    found: dict[str, dict[str, Call]] = {
        "WGrad": {PLAIN: partial(torch.mm, dy.t(), x)},
        "FProp": {PLAIN: partial(torch.mm, x, w.t())},
        "DGrad": {PLAIN: partial(torch.mm, dy, w)},
    }
    if not who:
        return found
    some = next(iter(who.values()))
    plain, turned = some.weight(w, format_named(WEIGHTS))
    knobs: dict[str, Any] = {"fmt": format_named(ACTS), "has_rows": True, "has_columns": True}
    (xr, xc), (dr, dc) = (some.runs(side, is_twice=False, **knobs) for side in (x, dy))
    _, square = some.runs(x, is_twice=True, is_square=True, **knobs)
    assert xr is not None and dr is not None and dc is not None
    for name, kernels in who.items():
        right = square if kernels.is_square else xc
        assert right is not None
        found["WGrad"][name] = partial(kernels.by_runs, dc, right)
        if name in ("deep_gemm", "scaled_mm", "reference"):
            found["FProp"][name] = partial(kernels.by_tiles, xr, plain)
            found["DGrad"][name] = partial(kernels.by_tiles, dr, turned)
    return found


def error_rows(device: str) -> Iterator[Row]:
    """Cost of each rounding of WGrad's operands: relative error of dW against the float64 product of bf16 operands.

    "gaussian": as the specification's test; "spread": channels and tokens differ in size, log-normally, by a factor
    e^1.5 at one standard deviation, which is where fewer scales would show.
    """
    generator = torch.Generator().manual_seed(5)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    knobs: dict[str, Any] = {"fmt": format_named(ACTS), "has_rows": False, "has_columns": True}
    for data in ("gaussian", "spread"):
        x, dy = (randn(1024, size) for size in (512, 256))
        if data == "spread":
            x, dy = (side * (1.5 * randn(1024, 1)).exp() * (1.5 * randn(1, side.shape[1])).exp() for side in (x, dy))
        x, dy = (side.bfloat16().to(device) for side in (x, dy))
        exact = dy.double().t() @ x.double()
        for what, is_twice, is_square in (("runs", True, False), ("runs, X kept in bf16", False, False),
                                          ("square tiles of X", True, True)):  # fmt: skip
            runs = reference().runs
            (_, a), (_, b) = runs(dy, is_twice=False, **knobs), runs(x, is_twice=is_twice, is_square=is_square, **knobs)
            assert a is not None and b is not None
            yield {"data": data, "WGrad": what, "error": _relative(a, b, exact), "worst_channel": _worst(a, b, exact)}


def _relative(a: Operand, b: Operand, exact: Tensor) -> float:
    found = a.values().double() @ b.values().double().t()
    return float((found - exact).norm() / exact.norm())


def _worst(a: Operand, b: Operand, exact: Tensor) -> float:
    """The largest relative error of a column of dW, which is one channel of X."""
    found = a.values().double() @ b.values().double().t()
    return float(((found - exact).norm(dim=0) / exact.norm(dim=0)).max())
