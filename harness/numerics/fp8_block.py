"""What feeds an FP8 product, made together with its codes: RMS norms, the gated unit, residual sums.

    normed_linear  Y = norm(X) W^T
    gated_block    H = X + MORE;  H + (silu(G) * U) W_down^T  with  [G, U] = norm(H) W_up^T

No bf16 tensor lies between a norm or a gated unit and the product behind it, nor, on the way back, between the gated
unit's gradient and the two products that read it: codes alone are written and saved. What is rounded, and where, is
the unfused flow's of `fp8_gemm.py` around bf16 modules as vLLM's and torch's are: a norm is rounded before and behind
its gain, silu before the product. Saved are H, its factors, [G, U] in bf16 and X^T's codes of both products.
`Fused` says who computes; `reference` in torch on any device, `flow_kernels.fused` on a GPU.
Left out: biases, layers of unequal kernels, and shapes that 128 does not divide.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.numerics import fp8_gemm
from harness.numerics.formats import Format
from harness.numerics.fp8_gemm import Flow, Kernels, Operand, Runs


class Sourced(Protocol):
    """Quantizes what it makes of its tensors, rounded as `Runs` does with a tensor that is there."""

    def __call__(
        self, *tensors: Tensor, fmt: Format, has_rows: bool, has_columns: bool, is_twice: bool, is_square: bool
    ) -> tuple[Operand | None, Operand | None]:
        """-> (X, X^T) as asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Who computes what lies between the products; all tensors bf16 [T, ...] unless said."""

    add_norm: Any
    """(x, more | None, eps) -> (x + more, float32 [T] 1 / sqrt(mean of its squares + eps))."""
    norm_back: Any
    """(dy, x, factor, gain, rest | None) -> (gradient of x, plus `rest`; float32 [H] gradient of the gain)."""
    norm: Sourced
    """x, factor [T], gain [H]."""
    gated: Sourced
    """[gate, up] [T, 2 I] -> silu(gate) * up."""
    gated_back: Sourced
    """[gate, up], dy [T, I] -> its gradient [T, 2 I]."""


def normed_linear(
    x: Tensor, gain: Tensor, weight: Tensor, flow: Flow, fused: Fused, eps: float
) -> tuple[Tensor, Tensor]:
    """bf16 `x` [T, H], `gain` [H], `weight` float [N, H] -> (Y [T, N], `x` again).

    Use the second output for the residual path: the two gradients are then added by the norm's own backward pass.
    """
    return cast(tuple[Tensor, Tensor], _NormedLinear.apply(x, gain, weight, flow, fused, eps))


def gated_block(
    x: Tensor, more: Tensor, gain: Tensor, up: Tensor, down: Tensor, flows: tuple[Flow, Flow], fused: Fused, eps: float
) -> Tensor:
    """bf16 `x`, `more` [T, H], `up` float [2 I, H], gate above, `down` float [H, I] -> bf16 [T, H]."""
    return cast(Tensor, _GatedBlock.apply(x, more, gain, up, down, flows, fused, eps))


def _wanted(flow: Flow, has_columns: bool, is_saved: bool) -> dict[str, Any]:
    """How an operand is made: `is_saved`, it is X; else it is dY, whose two codes come of one rounding each."""
    return {"fmt": flow.acts, "has_rows": True, "has_columns": has_columns,
            "is_twice": is_saved and flow.is_saved_fp8, "is_square": is_saved and flow.kernels.is_square}  # fmt: skip


def _by_tiles(kernels: Kernels, rows: Operand | None, w: Operand, tokens: int) -> Tensor:
    assert rows is not None
    return kernels.by_tiles(rows, w)[:tokens]


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, weight: Tensor, flow: Flow, fused: Fused, eps: float
    ) -> tuple[Tensor, Tensor]:
        kernels, has_columns = flow.kernels, flow.has_graph and ctx.needs_input_grad[2]
        w, turned = flow.held or kernels.weight(weight, flow.weights)
        x = x.contiguous()
        _, factor = fused.add_norm(x, None, eps)
        rows, columns = fused.norm(x, factor, gain, **_wanted(flow, has_columns, True))
        ctx.save_for_backward(x, factor, gain, *_tensors(turned), *_tensors(columns))
        ctx.flow, ctx.fused = flow, fused
        return _by_tiles(kernels, rows, w, len(x)), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flow, kernels, fused = ctx.flow, ctx.flow.kernels, ctx.fused
        x, factor, gain, *saved = ctx.saved_tensors
        turned, columns = _operand(saved[:2]), _operand(saved[2:])
        assert turned is not None
        rows, dy_columns = _quantized(kernels.runs, grads[0], flow, columns is not None)
        dw = None if columns is None or dy_columns is None else kernels.by_runs(dy_columns, columns)
        dn = _by_tiles(kernels, rows, turned, len(x))
        dx, dgain = fused.norm_back(dn, x, factor, gain, grads[1].contiguous())
        return dx, dgain.to(gain.dtype), dw, None, None, None


class _GatedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, more: Tensor, gain: Tensor, up: Tensor, down: Tensor, flows: tuple[Flow, Flow],
        fused: Fused, eps: float,
    ) -> Tensor:  # fmt: skip
        (first, second), kernels = flows, flows[0].kernels
        wants = [flow.has_graph and wanted for flow, wanted in zip(flows, ctx.needs_input_grad[3:5], strict=True)]
        w_up, up_turned = first.held or kernels.weight(up, first.weights)
        w_down, down_turned = second.held or kernels.weight(down, second.weights)
        h, factor = fused.add_norm(x.contiguous(), more.contiguous(), eps)
        rows, h_columns = fused.norm(h, factor, gain, **_wanted(first, wants[0], True))
        both = _by_tiles(kernels, rows, w_up, len(h))
        rows, columns = fused.gated(both, **_wanted(second, wants[1], True))
        y = _by_tiles(kernels, rows, w_down, len(h))
        operands = (up_turned, down_turned, h_columns, columns)
        if first.has_graph:
            ctx.save_for_backward(h, factor, gain, both, *(part for side in operands for part in _tensors(side)))
        ctx.flows, ctx.fused = flows, fused
        return h + y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (first, second), kernels, fused = ctx.flows, ctx.flows[0].kernels, ctx.fused
        h, factor, gain, both, *saved = ctx.saved_tensors
        up_turned, down_turned, h_columns, columns = (_operand(saved[i : i + 2]) for i in (0, 2, 4, 6))
        assert up_turned is not None and down_turned is not None
        dy, d_up, d_down = grads[0].contiguous(), None, None
        rows, dy_columns = _quantized(kernels.runs, dy, second, columns is not None)
        if dy_columns is not None and columns is not None:
            d_down = kernels.by_runs(dy_columns, columns)
        inner = _by_tiles(kernels, rows, down_turned, len(h))
        rows, dy_columns = fused.gated_back(both, inner, **_wanted(first, h_columns is not None, False))
        if dy_columns is not None and h_columns is not None:
            d_up = kernels.by_runs(dy_columns, h_columns)
        dx, dgain = fused.norm_back(_by_tiles(kernels, rows, up_turned, len(h)), h, factor, gain, dy)
        return dx, dx, dgain.to(gain.dtype), d_up, d_down, None, None, None


def _quantized(runs: Runs, dy: Tensor, flow: Flow, has_columns: bool) -> tuple[Operand | None, Operand | None]:
    return runs(dy, **_wanted(flow, has_columns, False))


def _tensors(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.codes, operand.scale)


def _operand(saved: list[Tensor | None]) -> Operand | None:
    codes, scale = saved
    return None if codes is None or scale is None else Operand(codes=codes, scale=scale)


def reference() -> Fused:
    """The definition, in torch: bf16 tensors as the modules make them, then `fp8_gemm.reference`."""
    runs = fp8_gemm.reference().runs

    def sourced(make: Any, *tensors: Tensor, **wanted: Any) -> tuple[Operand | None, Operand | None]:
        return runs(make(*tensors), **wanted)

    return Fused(add_norm=_add_norm, norm_back=_norm_back, norm=partial(sourced, _norm),
                 gated=partial(sourced, _gated), gated_back=partial(sourced, _gated_back))  # fmt: skip


def _add_norm(x: Tensor, more: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x = x if more is None else x + more
    return x, torch.rsqrt(x.float().square().mean(-1) + eps)


def _norm(x: Tensor, factor: Tensor, gain: Tensor) -> Tensor:
    return (x.float() * factor[:, None]).to(torch.bfloat16) * gain


def _norm_back(dy: Tensor, x: Tensor, factor: Tensor, gain: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    normed = x.float() * factor[:, None]
    dn = (dy * gain).float()
    dx = ((dn - normed * (dn * normed).mean(-1, keepdim=True)) * factor[:, None]).to(torch.bfloat16)
    return dx if rest is None else dx + rest, (dy.float() * normed.to(torch.bfloat16).float()).sum(0)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _gated_back(both: Tensor, dy: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    wide, sigmoid = gate.float(), torch.sigmoid(gate.float())
    d_silu = (dy * up).float()
    return torch.cat(((d_silu * sigmoid * (1 + wide * (1 - sigmoid))).to(torch.bfloat16), dy * F.silu(gate)), -1)
