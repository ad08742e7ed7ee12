"""The three FP8 products of `fp8_flow.py` over codes and scales, as an FP8 tensor core takes them.

    FProp  Y = X W^T     X  [T, K] runs along K    W   [N, K] square tiles    -> bf16
    DGrad  dX = dY W     dY [T, N] runs along N    W^T [K, N] square tiles    -> bf16
    WGrad  dW = dY^T X   dY^T [N, T] runs along T  X^T [K, T] runs along T    -> float32

Both operands of every product lie with the contracted axis innermost, the one layout that Hopper's FP8 units read, and
T is filled with zeros up to 128. `Kernels` says who quantizes and multiplies: `reference()` in float32 on any device,
`harness.kernels.fp8_flow` on a GPU. What is rounded, and where, is the emulated flow's, code for code. The
bias is added to the bf16 product, as vLLM adds it: one rounding more than in the emulated flow.
Left out: shapes that 128 does not divide (they stay emulated), and accumulation into a gradient that is there already.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.numerics.formats import Format, format_named
from harness.numerics.quantize import fake_quantize, quantize

E4M3 = torch.float8_e4m3fn
TILE = 128
"""Rows and columns of a weight's tile, elements of a run, and what T is filled up to."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Operand of an FP8 product."""

    codes: Tensor
    """float8_e4m3fn [R, C], contiguous; C is contracted over."""
    scale: Tensor
    """float32 multipliers: of runs [R, C / 128] with strides (1, R); of square tiles [R / 128, C / 128], contiguous."""

    def values(self) -> Tensor:
        """The float32 values [R, C]."""
        rows, columns = self.codes.shape
        scale = self.scale.repeat_interleave(columns // self.scale.shape[1], 1)
        return self.codes.to(torch.float32) * scale.repeat_interleave(rows // scale.shape[0], 0)


class Runs(Protocol):
    """Quantizer of an activation or a gradient."""

    def __call__(
        self, x: Tensor, fmt: Format, *, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool = False
    ) -> tuple[Operand | None, Operand | None]:
        """`x` [T, C] of any float dtype and strides, rounded to bf16 first -> (X [T', C], X^T [C, T']) in runs of 128.

        T' is T filled up with zeros. `is_twice`: X^T is made from X's FP8 form as it comes back from memory, which is
        its values rounded to bf16. `is_square`: X^T in square tiles. What is not asked for is None.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions that quantize and that multiply."""

    name: str
    weight: Callable[[Tensor, Format], tuple[Operand, Operand]]
    """A master weight [N, K], rounded to bf16 first -> (W, W^T) in square tiles, of one and the same codes."""
    runs: Runs
    by_tiles: Callable[[Operand, Operand], Tensor]
    """Runs [M, C] and square tiles [N, C] -> bf16 [M, N], summed in float32."""
    by_runs: Callable[[Operand, Operand], Tensor]
    """Runs [M, C] and runs [N, C] -> float32 [M, N]; where `is_square`, of square tiles [N, C]."""
    is_square: bool = False
    """X^T of WGrad in square tiles: one scale where the flow has 128. A variant of the flow, for those who ask for it:
    Hopper scales a product of runs by square tiles with half the instructions."""


def fits(shape: tuple[int, ...], weights: Format, acts: Format) -> bool:
    """Can the products of a weight of `shape` [N, K] under these formats be computed on codes?"""
    is_whole = len(shape) == 2 and all(size > 0 and size % TILE == 0 for size in shape)
    return is_whole and weights.tile == (TILE, TILE) and acts.tile == (1, TILE)


def padded(tokens: int) -> int:
    """T rounded up to whole tiles."""
    return -(-tokens // TILE) * TILE


_KERNELS: dict[str, Kernels] = {}


def key_of(kernels: Kernels) -> str:
    """Name under which the operators of this file find `kernels` again: an operator takes tensors and plain values."""
    for key, known in _KERNELS.items():
        if known == kernels:
            return key
    key = kernels.name if kernels.name not in _KERNELS else f"{kernels.name}, {len(_KERNELS)}"
    _KERNELS[key] = kernels
    return key


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _operator(name: str, shapes: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator that makes a function of tensors and plain values the operator `lowbit::name`, on every device and
    without gradients. `shapes` gives empty tensors like its results, for the compiler.

    Not `torch.library.custom_op`: its checks take the host longer than the rest of a call, and an update makes ten
    thousand calls.
    """

    def define(body: Callable[_P, _R]) -> Callable[_P, _R]:
        known: Any = torch.library
        known.define(f"lowbit::{name}", torch.library.infer_schema(body, mutates_args=()))
        known.impl(f"lowbit::{name}", "default", body)
        known.register_fake(f"lowbit::{name}", shapes)
        return getattr(torch.ops.lowbit, name).default

    return define


def _weight_shapes(weight: Tensor, kernels: str, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n, k), wide = weight.shape, torch.float32
    return (weight.new_empty(n, k, dtype=E4M3), weight.new_empty(n // TILE, k // TILE, dtype=wide),
            weight.new_empty(k, n, dtype=E4M3), weight.new_empty(k // TILE, n // TILE, dtype=wide))  # fmt: skip


@_operator("fp8_weight", _weight_shapes)
def weight_codes(weight: Tensor, kernels: str, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of W and of W^T, as `Kernels.weight` makes them, of a master weight [N, K]."""
    plain, turned = _KERNELS[kernels].weight(weight, format_named(fmt))
    return plain.codes, plain.scale, turned.codes, turned.scale


def _run_shapes(
    x: Tensor, kernels: str, fmt: str, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, k), wide = x.shape, torch.float32
    tiles = (tokens + TILE - 1) // TILE
    codes, scale, turned, turned_scale = *_tensors(None, x), *_tensors(None, x)
    if has_rows:
        codes, scale = x.new_empty(tiles * TILE, k, dtype=E4M3), x.new_empty(k // TILE, tiles * TILE, dtype=wide).t()
    if has_columns:
        turned = x.new_empty(k, tiles * TILE, dtype=E4M3)
        turned_scale = (x.new_empty(k // TILE, tiles, dtype=wide) if is_square else
                        x.new_empty(tiles, k, dtype=wide).t())  # fmt: skip
    return codes, scale, turned, turned_scale


@_operator("fp8_runs", _run_shapes)
def _run_codes(
    x: Tensor, kernels: str, fmt: str, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of X and of X^T, as `Kernels.runs` makes them; empty where not asked for."""
    rows, columns = _KERNELS[kernels].runs(
        x, format_named(fmt), has_rows=has_rows, has_columns=has_columns, is_twice=is_twice, is_square=is_square
    )
    return *_tensors(rows, x), *_tensors(columns, x)


def _tensors(operand: Operand | None, like: Tensor) -> tuple[Tensor, Tensor]:
    if operand is None:
        return like.new_empty(0, dtype=E4M3), like.new_empty(0, dtype=torch.float32)
    return operand.codes, operand.scale


def _product_shape(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kernels: str, is_by_runs: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.float32 if is_by_runs else torch.bfloat16)


@_operator("fp8_product", _product_shape)
def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kernels: str, is_by_runs: bool) -> Tensor:
    """Codes and scales of two operands -> `Kernels.by_runs`, float32 [M, N], or `Kernels.by_tiles`, bf16 [M, N]."""
    multiply = _KERNELS[kernels].by_runs if is_by_runs else _KERNELS[kernels].by_tiles
    return multiply(Operand(codes=a, scale=a_scale), Operand(codes=b, scale=b_scale))


class _Product(torch.autograd.Function):
    """X W^T + b [T, N] of X [T, K] in bf16 over codes of W, and its gradients: dX in bf16, dW and db in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, turned: Tensor,
        turned_scale: Tensor, kernels: str, acts: str, is_twice: bool, keeps: bool, is_square: bool,
    ) -> Tensor:  # fmt: skip
        row, row_scale, column, column_scale = _run_codes(x, kernels, acts, True, keeps, is_twice, is_square)
        y = _product(row, row_scale, codes, scale, kernels, False)[: x.shape[0]]
        ctx.save_for_backward(turned, turned_scale, column, column_scale)
        ctx.kernels, ctx.acts = kernels, acts
        return y if bias is None else y + bias.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, (turned, turned_scale, x, x_scale) = grads[0], ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        row, row_scale, column, column_scale = _run_codes(
            dy, ctx.kernels, ctx.acts, wants_x, wants_weight, False, False
        )
        dx = dw = db = None
        if wants_x:
            dx = _product(row, row_scale, turned, turned_scale, ctx.kernels, False)[: dy.shape[0]]
        if wants_weight:
            dw = _product(column, column_scale, x, x_scale, ctx.kernels, True)
        if wants_bias:
            db = dy.sum(0, dtype=torch.float32)
        return dx, dw, db, *[None] * 9


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Sequence[Tensor], *, kernels: str, acts: str, is_twice: bool
) -> Tensor:
    """bf16 [..., K] -> bf16 [..., N], with the gradients of the docstring. Quantizers and products are operators: a
    compiler passes them on unchanged, fuses what lies around them, and quantizes an input of several layers once.

    `weight` float [N, K] and `bias` [N] get gradients; `codes` are the weight's (`weight_codes`), `kernels` is a
    `key_of`, `acts` the name of a format. `is_twice`: X is kept in FP8. N and K must be multiples of 128 (`fits`).
    """
    keeps, is_square = torch.is_grad_enabled() and weight.requires_grad, _KERNELS[kernels].is_square
    flat = x.flatten(0, -2)
    y = cast(Tensor, _Product.apply(flat, weight, bias, *codes, kernels, acts, is_twice, keeps, is_square))
    return y.view(*x.shape[:-1], len(weight))


def reference(*, is_square: bool = False) -> Kernels:
    """The definition: `quantize`, and float32 products of the values. For tests, on any device."""
    name = "reference, square" if is_square else "reference"
    return Kernels(name=name, weight=_weight, runs=_runs, by_tiles=_by_tiles, by_runs=_by_runs, is_square=is_square)


def _weight(weight: Tensor, fmt: Format) -> tuple[Operand, Operand]:
    q = quantize(weight.to(torch.bfloat16), fmt)
    assert q.scale is not None
    turned = Operand(codes=_turned(q.codes), scale=_turned(q.scale))
    return Operand(codes=q.codes, scale=q.scale), turned


def _turned(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


def _runs(
    x: Tensor, fmt: Format, *, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool = False
) -> tuple[Operand | None, Operand | None]:
    whole = F.pad(x.detach().to(torch.bfloat16), (0, 0, 0, padded(len(x)) - len(x)))
    rows = _along(whole, fmt) if has_rows else None
    again = fake_quantize(whole, fmt).to(torch.bfloat16) if is_twice else whole
    if not has_columns:
        return rows, None
    turned = again.t().contiguous()
    if is_square:
        q = quantize(turned, replace(fmt, tile=(TILE, TILE)))
        assert q.scale is not None
        return rows, Operand(codes=q.codes, scale=q.scale)
    return rows, _along(turned, fmt)


def _along(x: Tensor, fmt: Format) -> Operand:
    q = quantize(x, fmt)
    assert q.scale is not None
    return Operand(codes=q.codes, scale=q.scale.t().contiguous().t())


def _by_tiles(a: Operand, b: Operand) -> Tensor:
    return F.linear(a.values(), b.values()).to(torch.bfloat16)


def _by_runs(a: Operand, b: Operand) -> Tensor:
    return F.linear(a.values(), b.values())
