"""Forward and backward of a decoder layer in the FP8 flow against bf16, at one size and number of tokens.

    python -m harness.devtools.bench fp8_layers [--size 7b] [--tokens 8192] [--length 1024] [--out FILE]
    python -m harness.devtools.bench fp8_layers --size toy --device cpu --tokens 256 --length 128

    bf16                 weights and gradients in bf16: nothing but the products
    bf16, fp32 masters   float32 weights and gradients, cast at every use, as autocast casts them
    fp8, NAME            float32 weights, quantized at every use; gradients float32
    fp8 held, NAME       the same behind the first micro-batch of a step: weights are quantized already
    ..., compiled        as runs compile their layers (`trainers.compiling`), for one shape

NAME is who multiplies (`launch.fp8_kernels`, "emulated"). A layer of a run differs: float32 between its products, q, k
and v and gate and up apart. Contestants take turns in one run; CUDA events, medians. "issue_ms" is the CPU's time to
launch a step: what lies above the GPU's is bound by launches. Bar: an FP8 layer that holds its weights is at least 1.45
times as fast as "bf16"; "x_compiled" is against "bf16, compiled". A contestant that fails loses alone, but for "bf16",
which all are compared with. Left out: the optimizer, the head and the rollout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from harness.devtools.bench.fp8_layers_model import COMPILED, PLAIN, Contestant, build, lineup
from harness.devtools.bench.runner import (
    add_device_and_out,
    add_numbers,
    check_device,
    check_positive,
    reason,
    save,
    table,
)
from harness.devtools.bench.timing import device_seconds, host_seconds, in_turns
from harness.foundation.provenance import commit, cpu_name, packages
from harness.numerics.fp8_flow import held_weights
from harness.numerics.fp8_gemm import Kernels
from harness.studies.throughput.shapes import SIZES

WARM_UP, REPEATS = 3, 15
Row = dict[str, Any]


def available(device: str) -> dict[str, Kernels | None]:
    """Kernels that can multiply here, by name; None: emulated. Raises ValueError for a GPU without FP8 products."""
    if device == "cpu":
        return {"emulated": None}
    from harness.kernels import fp8_flow

    if fp8_flow.best(torch.device(device)) is None:
        raise ValueError("--device is cuda, but its FP8 products need a Hopper GPU (compute capability 9.0)")
    has_deep_gemm = fp8_flow.has_deep_gemm()
    return {name: fp8_flow.kernels_named(name) for name in fp8_flow.NAMES if has_deep_gemm or name == "scaled_mm"}


def failures() -> tuple[type[Exception], ...]:
    """Exceptions of a contestant that this device or these packages do not take: it loses, the others go on."""
    found: tuple[type[Exception], ...] = (RuntimeError, ValueError, ImportError, AttributeError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return found
    return (*found, TritonError)


def inputs(given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(x, the gradient of the layer's output), Gaussian bf16 [T, H]; x wants a gradient."""
    generator, shape = torch.Generator(given.device).manual_seed(7), (given.tokens, SIZES[given.size].hidden_size)
    x, dy = (torch.randn(shape, device=given.device, generator=generator) for _ in range(2))
    return x.bfloat16().requires_grad_(), dy.bfloat16()


def step(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """One micro-batch, forward and backward, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).backward(dy)


def layer_rows(given: argparse.Namespace, entries: list[Contestant]) -> list[Row]:
    """A row per contestant, those that failed first. One model per contestant, all of them alive.

    Raises ValueError where "bf16" fails.
    """
    x, dy = inputs(given)
    ready: dict[str, tuple[Contestant, nn.Module]] = {}
    failed: list[Row] = []
    with ExitStack() as held:
        for entry in entries:
            try:
                model = build(SIZES[given.size], entry, length=given.length, device=given.device)
                if entry.is_held:
                    held.enter_context(held_weights(model))
                for _ in range(2):
                    device_seconds(partial(step, model, x, dy), given.device)
            except failures() as error:
                if entry.name == PLAIN:
                    raise ValueError(f"{PLAIN}, which all others are compared with: {reason(error)}") from error
                failed.append({"what": entry.name, "failed": reason(error)})
                continue
            ready[entry.name] = (entry, model)
        return [*failed, *_timed(ready, x, dy, given)]


def _timed(
    ready: Mapping[str, tuple[Contestant, nn.Module]], x: Tensor, dy: Tensor, given: argparse.Namespace
) -> list[Row]:
    def in_their_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        return in_turns(calls, partial(device_seconds, device=given.device), WARM_UP, given.repeats)

    calls = {name: partial(step, model, x, dy) for name, (_, model) in ready.items()}
    both = in_their_turns(calls)
    apart = _errors(ready, x, dy)
    issued = {name: median(host_seconds(call, given.device) for _ in range(3)) for name, call in calls.items()}
    with torch.no_grad():
        forward = in_their_turns({name: partial(model, x) for name, (_, model) in ready.items()})
    ms = {name: median(times) * 1e3 for name, times in both.items()}
    return [
        {
            "what": name, "ms": ms[name], "ms_min": min(times) * 1e3, "ms_max": max(times) * 1e3,
            "issue_ms": issued[name] * 1e3, "x_bf16": ms[PLAIN] / ms[name],
            "x_compiled": ms[COMPILED] / ms[name] if COMPILED in ms else None,
            "forward_ms": median(forward[name]) * 1e3,
            "forward_x_bf16": median(forward[PLAIN]) / median(forward[name]),
            "tokens_per_s": given.tokens / ms[name] * 1e3, "output_error": apart[name][0],
            "grad_error": apart[name][1], "repeats": len(times), "bar": ready[name][0].bar, "failed": None,
        }
        for name, times in both.items()
    ]  # fmt: skip


def _errors(ready: Mapping[str, tuple[Contestant, nn.Module]], x: Tensor, dy: Tensor) -> dict[str, tuple[float, float]]:
    """Relative errors of the output and of the linear weights' gradients, against "bf16"."""
    found: dict[str, tuple[float, float]] = {}
    plain, want = [torch.empty(0)], torch.empty(0)
    for name, (_, model) in ready.items():
        step(model, x, dy)
        with torch.no_grad():
            y = model(x)
        grads = [p.grad for p in model.parameters() if p.grad is not None and p.ndim == 2]
        if name == PLAIN:
            plain, want = grads, y
        wrong = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(grads, plain, strict=True))
        whole = sum(float(b.float().square().sum()) for b in plain)
        error = float((y.float() - want.float()).norm() / want.float().norm())
        found[name] = (error, (wrong / whole) ** 0.5)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser)
    parser.add_argument("--size", choices=sorted(SIZES), default="7b", help="Qwen2.5's shape (default: 7b)")
    add_numbers(
        parser, ("tokens", 8192, "of a micro-batch"), ("length", 1024, "of a sequence, which attention does not leave"),
        ("repeats", REPEATS, "of every contestant"),
    )  # fmt: skip


def command(given: argparse.Namespace) -> int:
    """Print the table; write the JSON where asked. Raises ValueError for what does not fit the size or the device."""
    check_device(given.device)
    check_positive(given, "tokens", "length", "repeats")
    if given.tokens % given.length:
        raise ValueError(f"--length is {given.length}; it must divide --tokens, which is {given.tokens}")
    device = torch.cuda.get_device_name() if given.device == "cuda" else cpu_name()
    rows = layer_rows(given, lineup(available(given.device), is_compiled=given.device == "cuda"))
    save(given.out, {
        "device": device, "commit": commit()[0], "packages": packages(), "size": given.size, "tokens": given.tokens,
        "length": given.length, "repeats": given.repeats, "layers": rows,
    })  # fmt: skip
    print(f"{given.size}, {given.tokens} tokens in sequences of {given.length}, on {device}\n{table(rows)}")
    return 0
