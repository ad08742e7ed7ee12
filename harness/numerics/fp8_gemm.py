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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.numerics.formats import Format
from harness.numerics.quantize import fake_quantize, quantize

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


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Kernels, formats and kept codes of a layer's products."""

    kernels: Kernels
    weights: Format
    acts: Format
    is_saved_fp8: bool
    has_graph: bool
    """Is a backward pass possible? Without one nothing is quantized along tokens and nothing is saved."""
    held: tuple[Operand, Operand] | None
    """(W, W^T) made earlier from the same weight."""


def fits(shape: tuple[int, ...] | torch.Size, weights: Format, acts: Format) -> bool:
    """Can the products of a weight of `shape` [N, K] under these formats be computed on codes?"""
    is_whole = len(shape) == 2 and all(size > 0 and size % TILE == 0 for size in shape)
    return is_whole and weights.tile == (TILE, TILE) and acts.tile == (1, TILE)


def padded(tokens: int) -> int:
    """T rounded up to whole tiles."""
    return -(-tokens // TILE) * TILE


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, flow: Flow) -> Tensor:
        kernels, acts = flow.kernels, flow.acts
        wants_x, wants_weight = (wanted and flow.has_graph for wanted in ctx.needs_input_grad[:2])
        w, turned = flow.held or kernels.weight(weight, flow.weights)
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = kernels.runs(
            flat, acts, has_rows=True, has_columns=wants_weight, is_twice=flow.is_saved_fp8, is_square=kernels.is_square
        )
        assert rows is not None
        saved = [*_tensors(turned if wants_x else None), *_tensors(columns)]
        ctx.save_for_backward(*saved)
        ctx.flow, ctx.shape, ctx.dtype = flow, x.shape, x.dtype
        y = kernels.by_tiles(rows, w)[: len(flat)]
        if bias is not None:
            y = y + bias.to(torch.bfloat16)
        return y.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flow = cast(Flow, ctx.flow)
        saved = ctx.saved_tensors  # read once: a checkpoint hands them out once
        turned, x = _operand(saved[:2]), _operand(saved[2:])
        dy = grads[0].flatten(0, -2)
        rows, columns = flow.kernels.runs(
            dy, flow.acts, has_rows=turned is not None, has_columns=x is not None, is_twice=False
        )
        dx = dw = db = None
        if rows is not None and turned is not None:
            dx = flow.kernels.by_tiles(rows, turned)[: len(dy)].to(ctx.dtype).view(ctx.shape)
        if columns is not None and x is not None:
            dw = flow.kernels.by_runs(columns, x)
        if ctx.needs_input_grad[2]:
            db = dy.to(torch.bfloat16).sum(0, dtype=torch.float32)
        return dx, dw, db, None


def _tensors(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.codes, operand.scale)


def _operand(saved: tuple[Tensor | None, ...]) -> Operand | None:
    codes, scale = saved
    return None if codes is None or scale is None else Operand(codes=codes, scale=scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, flow: Flow) -> Tensor:
    """`x` [..., K], `weight` float [N, K], `bias` [N] -> [..., N] in the dtype of `x`; gradients as in the docstring.

    N and K must be multiples of 128 (`fits`).
    """
    return cast(Tensor, _Products.apply(x, weight, bias, flow))


def reference(*, is_square: bool = False) -> Kernels:
    """The definition: `quantize`, and float32 products of the values. For tests, on any device."""
    name = "reference, square" if is_square else "reference"
    return Kernels(name=name, weight=_weight, runs=_runs, by_tiles=_by_tiles, by_runs=_by_runs, is_square=is_square)


def _weight(weight: Tensor, fmt: Format) -> tuple[Operand, Operand]:
    q = quantize(weight.to(torch.bfloat16), fmt)
    assert q.scale is not None
    turned = Operand(codes=q.codes.t().contiguous(), scale=q.scale.t().contiguous())
    return Operand(codes=q.codes, scale=q.scale), turned


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
