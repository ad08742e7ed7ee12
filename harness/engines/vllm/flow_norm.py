"""RMS norms around the FP8 flow's quantizers on a GPU, with the residual sums that they read and write anyway.

The forward kernel leaves one factor a token, by which the quantizer of runs multiplies (`flow_bodies._sourced`).
Left out: LayerNorm, and rows longer than one program's registers hold (16384).
"""

# A jitted function is typed as the Python that it is not: scalars are `constexpr`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false, reportOptionalOperand=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.engines.vllm.flow_bodies import _bf16
from harness.engines.vllm.kernels import has_fp8_cast

PROGRAMS = 528
"""Of the backward pass at most, four to a multiprocessor; each leaves its part of the gain's gradient."""
_HOW: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def add_norm_kernel(X, MORE, SUM, FACTOR, hidden, eps, HAS_MORE: tl.constexpr, HAS_CAST: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """One token: SUM = bf16(X + MORE), FACTOR = 1 / sqrt(mean of its squares + eps)."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + t * hidden + c, mask=c < hidden, other=0.0).to(tl.float32)
    if HAS_MORE:
        x = _bf16(x + tl.load(MORE + t * hidden + c, mask=c < hidden, other=0.0).to(tl.float32), HAS_CAST)
        tl.store(SUM + t * hidden + c, x, mask=c < hidden)
    mean = tl.sum(x * x, 0) / hidden
    tl.store(FACTOR + t, tl.rsqrt(mean + eps))


@triton.jit(do_not_specialize=["tokens"])
def norm_back_kernel(DY, X, FACTOR, GAIN, REST, DX, DGAIN, tokens, hidden, HAS_REST: tl.constexpr,
                     HAS_CAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Every num_programs-th token: DX = the norm's gradient + REST, the residual path's, each in bf16; all [T, H].

    DGAIN float32 [programs, H]: one program's tokens, added in their order.
    """
    c, wide = tl.arange(0, BLOCK), hidden.to(tl.int64)
    gain = tl.load(GAIN + c, mask=c < hidden, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = t * wide + c
        dy = tl.load(DY + at, mask=c < hidden, other=0.0).to(tl.float32)
        factor = tl.load(FACTOR + t)
        normed = tl.load(X + at, mask=c < hidden, other=0.0).to(tl.float32) * factor
        total += dy * _bf16(normed, HAS_CAST)
        dy = _bf16(dy * gain, HAS_CAST)
        dx = _bf16((dy - normed * (tl.sum(dy * normed, 0) / hidden)) * factor, HAS_CAST)
        if HAS_REST:
            dx = _bf16(dx + tl.load(REST + at, mask=c < hidden, other=0.0).to(tl.float32), HAS_CAST)
        tl.store(DX + at, dx, mask=c < hidden)
    tl.store(DGAIN + tl.program_id(0).to(tl.int64) * hidden + c, total, mask=c < hidden)


def add_norm(x: Tensor, more: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`Fused.add_norm` of contiguous bf16 tensors; `x` itself where there is nothing to add."""
    total = x if more is None else torch.empty_like(x)
    factor = torch.empty(len(x), device=x.device)
    kernel: Any = add_norm_kernel
    with torch.cuda.device_of(x):
        kernel[(len(x),)](
            x, x if more is None else more, total, factor, x.shape[1], eps, HAS_MORE=more is not None,
            HAS_CAST=has_fp8_cast(x.device), BLOCK=triton.next_power_of_2(x.shape[1]), **_HOW,
        )  # fmt: skip
    return total, factor


def norm_back(dy: Tensor, x: Tensor, factor: Tensor, gain: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Fused.norm_back` of contiguous bf16 tensors."""
    dx, programs = torch.empty_like(x), min(PROGRAMS, len(x))
    parts = torch.empty(programs, x.shape[1], device=x.device)
    kernel: Any = norm_back_kernel
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            dy, x, factor, gain, x if rest is None else rest, dx, parts, len(x), x.shape[1], HAS_REST=rest is not None,
            HAS_CAST=has_fp8_cast(x.device),
            BLOCK=triton.next_power_of_2(x.shape[1]), **_HOW,
        )  # fmt: skip
    return dx, parts.sum(0)
