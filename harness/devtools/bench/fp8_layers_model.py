"""The layers of the FP8 training benchmark: one architecture, its linear layers from a factory, and their steps.

Qwen2.5's: RMS norms, rotary positions, grouped-query attention by SDPA, SwiGLU. Left out: biases, embedding and head.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.devtools.bench.fp8_layers_parts import PLAIN, Call, Row, failures, medians, reason
from harness.devtools.bench.sync_model import Shape
from harness.devtools.bench.timing import device_seconds
from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import FP8Linear, held_weights, use_kernels
from harness.numerics.fp8_gemm import Kernels
from harness.trainers.local.compiling import compile_layers

MASTERS, COMPILED = "bf16, fp32 masters", "bf16, compiled"
BAR = 1.45
_OTHERS = ("square", "deep_gemm", "scaled_mm")
"""Other kernels that multiply in a layer that holds its weights."""
EPS = 1e-6
"""Epsilon of the norms."""
Make = Callable[[int, int], nn.Module]
"""(out, in) -> a linear layer."""


class MasterLinear(nn.Linear):
    """A bf16 product of a float32 master: cast on the way in, its gradient on the way back, as autocast does."""

    def forward(self, input: Tensor) -> Tensor:
        """bf16 [..., K] -> bf16 [..., N]."""
        return F.linear(input, self.weight.to(torch.bfloat16))


def makers(device: str) -> dict[str, Make]:
    """Contestant -> how its linear layers are made, with the same random weights."""

    def plain(n: int, k: int, kind: type[nn.Linear], dtype: torch.dtype) -> nn.Linear:
        layer = kind(k, n, bias=False, device=device, dtype=dtype)
        generator = torch.Generator(device).manual_seed(n + k)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(n, k, generator=generator, device=device).mul_(0.02))
        return layer

    def fp8(n: int, k: int) -> nn.Module:
        weights, acts = format_named("e4m3_block"), format_named("e4m3_1x128")
        return FP8Linear(plain(n, k, nn.Linear, torch.float32), weights=weights, acts=acts)

    return {
        "bf16": lambda n, k: plain(n, k, nn.Linear, torch.bfloat16),
        "bf16, fp32 masters": lambda n, k: plain(n, k, MasterLinear, torch.float32),
        "fp8": fp8,
    }


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """[T, H], in float32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * gain


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]."""
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, L, heads, d] turned by its position; `cos` and `sin` [L, 1, d / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Layer(nn.Module):
    """One decoder layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, make: Make, *, is_merged: bool, length: int, device: str) -> None:
        """`is_merged`: one product for q, k and v and one for gate and up; `length`: tokens of a sequence."""
        super().__init__()
        heads, pair = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape, self.length = shape, length
        self.qkv_sizes, self.up_sizes = [heads, pair, pair], [shape.intermediate] * 2
        self.qkv = self._projections(self.qkv_sizes, shape.hidden, make, is_merged)
        self.up = self._projections(self.up_sizes, shape.hidden, make, is_merged)
        self.o, self.down = make(shape.hidden, heads), make(shape.hidden, shape.intermediate)
        options = {"dtype": torch.bfloat16, "device": device}
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(shape.hidden, **options)) for _ in range(2))
        angle = torch.outer(torch.arange(length), 1e6 ** -torch.arange(0, 1, 2 / shape.head_dim))[:, None]
        self.register_buffer("cos", angle.cos().to(**options))
        self.register_buffer("sin", angle.sin().to(**options))

    @staticmethod
    def _projections(sizes: list[int], k: int, make: Make, is_merged: bool) -> nn.ModuleList:
        return nn.ModuleList([make(sum(sizes), k)] if is_merged else [make(n, k) for n in sizes])

    @staticmethod
    def _project(layers: nn.ModuleList, x: Tensor, sizes: list[int]) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in layers:
            found.append(layer(x).to(x.dtype))
        return list(found[0].split(sizes, -1)) if len(found) == 1 else found

    def attention(self, projected: list[Tensor]) -> Tensor:
        """q, k and v [T, heads * d] -> [T, heads * d], causal within each sequence."""
        q, k, v = (
            part.view(-1, self.length, part.shape[-1] // self.shape.head_dim, self.shape.head_dim) for part in projected
        )
        q, k = (rotated(part, self.cos, self.sin) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(projected[0]), -1)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, H] -> bf16 [T, H]."""
        projected = self._project(self.qkv, rms_norm(x, self.gains[0]), self.qkv_sizes)
        x = x + self.o(self.attention(projected)).to(x.dtype)
        gate, up = self._project(self.up, rms_norm(x, self.gains[1]), self.up_sizes)
        return x + self.down(swiglu(gate, up)).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to compute the layers."""

    name: str
    make: str
    """One of `makers`."""
    kernels: Kernels | None = None
    is_held: bool = False
    is_compiled: bool = False
    """As runs compile their layers (`trainers.compiling`), for one shape."""

    @property
    def bar(self) -> float | None:
        """x_bf16 that is asked of it."""
        return BAR if self.is_held else None


def lineup(who: dict[str, Kernels | None], given: argparse.Namespace) -> list[Contestant]:
    """All of them, the most telling first: what comes last may find no time left."""
    is_compiled = not (given.eager or given.quick or given.device == "cpu")
    name = "mixed" if "mixed" in who else next(iter(who))
    found = [Contestant(name=PLAIN, make="bf16")]
    if is_compiled:
        found += [Contestant(name=COMPILED, make="bf16", is_compiled=True), *_held(who, name, True)]
    found += _held(who, name, False)
    if not given.quick:
        for other in _OTHERS:
            found += _held(who, other, is_compiled) if other != name else []
        if is_compiled:
            found.append(Contestant(name=f"{MASTERS}, compiled", make=MASTERS, is_compiled=True))
        found += [
            Contestant(name=MASTERS, make=MASTERS),
            Contestant(name=f"fp8, {name}", make="fp8", kernels=who[name]),
        ]
    return found


def _held(who: dict[str, Kernels | None], name: str, is_compiled: bool) -> list[Contestant]:
    """The layer that holds its weights; none where nobody multiplies codes."""
    if who.get(name) is None:
        return []
    said = f"fp8 held, {name}{', compiled' if is_compiled else ''}"
    return [Contestant(name=said, make="fp8", kernels=who[name], is_held=True, is_compiled=is_compiled)]


def build(shape: Shape, entry: Contestant, given: argparse.Namespace) -> nn.Module:
    """The layers of a contestant, one behind the other."""
    make = makers(given.device)[entry.make]
    options = {"is_merged": not given.separate, "length": given.length, "device": given.device}
    found = nn.Sequential(*(Layer(shape, make, **options) for _ in range(given.layers)))
    use_kernels(found, entry.kernels)
    if entry.is_compiled:
        compile_layers(found, is_dynamic=False)
    return found


def inputs(shape: Shape, given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(x, the gradient of the layers' output), Gaussian bf16 [T, H]; x wants a gradient."""
    generator = torch.Generator(given.device).manual_seed(7)
    x, dy = (torch.randn(given.tokens, shape.hidden, device=given.device, generator=generator) for _ in range(2))
    return x.bfloat16().requires_grad_(), dy.bfloat16()


def step(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """One micro-batch, forward and backward, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).backward(dy)


def layer_rows(shape: Shape, given: argparse.Namespace, entries: Sequence[Contestant], until: float) -> Iterator[Row]:
    """Layers as a whole. One model per contestant, all of them alive; those that do not fit the time are named."""
    x, dy = inputs(shape, given)
    ready: dict[str, tuple[Contestant, nn.Module]] = {}
    enough = time.monotonic() + 0.75 * (until - time.monotonic())
    with ExitStack() as held:
        for entry in entries:
            if ready and time.monotonic() > enough:
                yield {"what": entry.name, "failed": "no time left"}
                continue
            try:
                model = build(shape, entry, given)
                if entry.is_held:
                    held.enter_context(held_weights(model))
                for _ in range(2):
                    device_seconds(partial(step, model, x, dy), given.device)
            except failures() as error:
                yield {"what": entry.name, "failed": reason(error)}
                continue
            ready[entry.name] = (entry, model)
        yield from _timed(ready, x, dy, given, until)


def _timed(
    ready: dict[str, tuple[Contestant, nn.Module]], x: Tensor, dy: Tensor, given: argparse.Namespace, until: float
) -> Iterator[Row]:
    calls: dict[str, Call] = {name: partial(step, model, x, dy) for name, (_, model) in ready.items()}
    both = medians(calls, given.device, given.repeats, until)
    apart = _errors(ready, x, dy)
    issued = {name: median(_issue_s(call, given.device) for _ in range(3)) for name, call in calls.items()}
    with torch.no_grad():
        forwards: dict[str, Call] = {name: partial(model, x) for name, (_, model) in ready.items()}
        forward = medians(forwards, given.device, given.repeats, until)
    ms = {name: median(times) * 1e3 for name, times in both.items()}
    for name, times in both.items():
        yield {
            "what": name, "ms": ms[name], "ms_min": min(times) * 1e3, "ms_max": max(times) * 1e3,
            "issue_ms": issued[name] * 1e3, "x_bf16": ms[PLAIN] / ms[name],
            "x_compiled": ms[COMPILED] / ms[name] if COMPILED in ms else None,
            "forward_ms": median(forward[name]) * 1e3,
            "forward_x_bf16": median(forward[PLAIN]) / median(forward[name]),
            "tokens_per_s": given.tokens / ms[name] * 1e3, "output_error": apart[name][0],
            "grad_error": apart[name][1], "repeats": len(times), "bar": ready[name][0].bar, "failed": None,
        }  # fmt: skip


def _issue_s(call: Call, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _errors(ready: dict[str, tuple[Contestant, nn.Module]], x: Tensor, dy: Tensor) -> dict[str, tuple[float, float]]:
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


def graph_rows(
    shape: Shape, given: argparse.Namespace, entries: Sequence[Contestant], layers: Sequence[Row]
) -> Iterator[Row]:
    """Steps replayed from a CUDA graph: bf16, compiled bf16 and the fastest FP8 layer."""
    ms = {row["what"]: row["ms"] for row in layers if row.get("ms")}
    fastest = sorted((name for name in ms if name.startswith("fp8")), key=ms.__getitem__)[:1]
    for entry in entries:
        if entry.name not in (PLAIN, COMPILED, *fastest):
            continue
        at = {"what": entry.name, "eager_ms": ms.get(entry.name)}
        try:
            with ExitStack() as held:
                model = build(shape, entry, given)
                if entry.is_held:
                    held.enter_context(held_weights(model))
                spent = median(medians({"": _recorded(model, *inputs(shape, given))}, given.device, given.repeats)[""])
        except failures() as error:
            yield at | {"graph_ms": None, "failed": reason(error)}
            continue
        yield at | {"graph_ms": spent * 1e3, "failed": None}


def _recorded(model: nn.Module, x: Tensor, dy: Tensor) -> Call:
    """A step's launches, recorded once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward(dy)
    return graph.replay
