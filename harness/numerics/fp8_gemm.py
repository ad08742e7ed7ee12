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
from typing import Any, Protocol

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


def fits(shape: tuple[int, ...] | torch.Size, weights: Format, acts: Format) -> bool:
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


@torch.library.custom_op("lowbit::fp8_weight", mutates_args=())
def weight_codes(weight: Tensor, kernels: str, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of W and of W^T, as `Kernels.weight` makes them, of a master weight [N, K]."""
    plain, turned = _KERNELS[kernels].weight(weight, format_named(fmt))
    return plain.codes, plain.scale, turned.codes, turned.scale


@weight_codes.register_fake
def _(weight: Tensor, kernels: str, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n, k), wide = weight.shape, torch.float32
    return (weight.new_empty(n, k, dtype=E4M3), weight.new_empty(n // TILE, k // TILE, dtype=wide),
            weight.new_empty(k, n, dtype=E4M3), weight.new_empty(k // TILE, n // TILE, dtype=wide))  # fmt: skip


@torch.library.custom_op("lowbit::fp8_product", mutates_args=())
def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor,
    kernels: str, acts: str, is_twice: bool, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(Y [T, N] bf16, codes and scales of X^T for the gradient of the weight, as bytes and as int32, which have no
    gradients). `weight` is here for its gradient alone."""
    found = _KERNELS[kernels]
    rows, columns = found.runs(
        x, format_named(acts), has_rows=True, has_columns=keeps, is_twice=is_twice, is_square=found.is_square
    )
    assert rows is not None
    y = found.by_tiles(rows, Operand(codes=codes, scale=scale))[: len(x)]
    if bias is not None:
        y = y + bias.to(torch.bfloat16)
    if columns is None:
        return y, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.int32)
    return y, columns.codes.view(torch.uint8), columns.scale.view(torch.int32)


@_product.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor,
    kernels: str, acts: str, is_twice: bool, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (tokens, k), y = x.shape, x.new_empty(x.shape[0], weight.shape[0])
    if not keeps:
        return y, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.int32)
    tiles = (tokens + TILE - 1) // TILE
    scales = (x.new_empty(k // TILE, tiles, dtype=torch.int32) if _KERNELS[kernels].is_square else
              x.new_empty(tiles, k, dtype=torch.int32).t())  # fmt: skip
    return y, x.new_empty(k, tiles * TILE, dtype=torch.uint8), scales


@torch.library.custom_op("lowbit::fp8_gradients", mutates_args=())
def _gradients(
    dy: Tensor, turned: Tensor, turned_scale: Tensor, columns: Tensor, column_scale: Tensor, kernels: str, acts: str,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dX [T, K] bf16, dW [N, K] float32, db [N] float32); empty where not wanted."""
    found = _KERNELS[kernels]
    rows, across = found.runs(dy, format_named(acts), has_rows=wants_x, has_columns=wants_weight, is_twice=False)
    dx, dw, db = dy.new_empty(0), turned_scale.new_empty(0), turned_scale.new_empty(0)
    if rows is not None:
        dx = found.by_tiles(rows, Operand(codes=turned, scale=turned_scale))[: len(dy)]
    if across is not None:
        dw = found.by_runs(across, Operand(codes=columns.view(E4M3), scale=column_scale.view(torch.float32)))
    if wants_bias:
        db = dy.sum(0, dtype=torch.float32)
    return dx, dw, db


@_gradients.register_fake
def _(
    dy: Tensor, turned: Tensor, turned_scale: Tensor, columns: Tensor, column_scale: Tensor, kernels: str, acts: str,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (tokens, n), k = dy.shape, turned.shape[0]
    return (dy.new_empty((tokens, k) if wants_x else (0,)), turned_scale.new_empty((n, k) if wants_weight else (0,)),
            turned_scale.new_empty((n,) if wants_bias else (0,)))  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[5:7], *output[1:])
    ctx.kernels, ctx.acts = inputs[7:9]


def _backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:3]
    found = _gradients(dy, *ctx.saved_tensors, ctx.kernels, ctx.acts, *wanted)
    return *(grad if wants else None for grad, wants in zip(found, wanted, strict=True)), *[None] * 8


_product.register_autograd(_backward, setup_context=_keep)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, codes: Sequence[Tensor], *, kernels: str, acts: str, is_twice: bool
) -> Tensor:
    """bf16 [..., K] -> bf16 [..., N], with the gradients of the docstring, as operators that a compiler passes on
    unchanged and whose neighbours it fuses.

    `weight` float [N, K] and `bias` [N] get gradients; `codes` are the weight's (`weight_codes`), `kernels` is a
    `key_of`, `acts` the name of a format. `is_twice`: X is kept in FP8. N and K must be multiples of 128 (`fits`).
    """
    keeps = torch.is_grad_enabled() and weight.requires_grad
    y, _, _ = _product(x.flatten(0, -2), weight, bias, *codes, kernels, acts, is_twice, keeps)
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
