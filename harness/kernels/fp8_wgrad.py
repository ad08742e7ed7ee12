"""WGrad's product of this project's own: runs of 128 by runs of 128 in Triton, for comparison with the libraries'.

    dW[m, n] = sum over blocks k of A_SCALE[k, m] * B_SCALE[k, n] * (the FP8 product of block k)

An FP8 unit of Hopper sums one block, then the partial sum is scaled into float32 registers, as the format demands. Two
programs share a multiprocessor, so that one multiplies while the other scales. Left out: splits of the contraction,
which would need the sums of several programs added in an order of their own, and Blackwell.
"""

# A jitted function is typed as the Python that it is not: scalars are `constexpr`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalOperand=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.numerics.fp8_gemm import TILE, Operand

LAUNCHES: dict[str, dict[str, int]] = {
    "triton": {"WIDTH": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    "triton, narrow": {"WIDTH": 64, "num_warps": 8, "num_stages": 4, "maxnreg": 128},
    "triton, alone": {"WIDTH": 128, "num_warps": 8, "num_stages": 5, "maxnreg": 232},
}
"""Two programs to a multiprocessor, of square or of narrow tiles, or one with more loads under way; the same bits."""
_GROUP = 8
"""Tiles of rows that neighbouring programs share: their operands stay in the L2 cache."""


@triton.jit(do_not_specialize=["blocks"])
def by_runs_kernel(
    A, B, A_SCALE, B_SCALE, OUT, rows, columns, blocks, IS_ADDED: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One HEIGHT x WIDTH tile of OUT [rows, columns]; A and B describe codes [rows, T] and [columns, T]."""
    wide = columns // WIDTH
    first = tl.program_id(0) // (GROUP * wide) * GROUP
    height = tl.minimum(rows // HEIGHT - first, GROUP)
    within = tl.program_id(0) % (GROUP * wide)
    m, n = first + within % height, within // height
    row, column = m * HEIGHT + tl.arange(0, HEIGHT), n * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for k in range(blocks):
        part = tl.dot(A.load([m * HEIGHT, k * 128]), B.load([n * WIDTH, k * 128]).T)
        # Behind the product, which runs while they load.
        left, right = tl.load(A_SCALE + k * rows + row), tl.load(B_SCALE + k * columns + column)
        total += part * left[:, None] * right[None, :]
    at = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
    if IS_ADDED:
        total += tl.load(at)
    tl.store(at, total)


def by_runs(a: Operand, b: Operand, *, out: Tensor | None = None, launch: str = "triton") -> Tensor:
    """`Kernels.by_runs`; `out` float32 [M, N]: it is added to, and returned. `launch`: one of `LAUNCHES`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, tokens), columns, width = a.codes.shape, len(b.codes), LAUNCHES[launch]["WIDTH"]
    found = torch.empty(rows, columns, device=a.codes.device) if out is None else out
    kernel: Any = by_runs_kernel
    with torch.cuda.device_of(found):
        kernel[(rows // TILE * (columns // width),)](
            TensorDescriptor.from_tensor(a.codes, [TILE, TILE]), TensorDescriptor.from_tensor(b.codes, [width, TILE]),
            a.scale, b.scale, found, rows, columns, tokens // TILE, IS_ADDED=out is not None, HEIGHT=TILE,
            GROUP=_GROUP, enable_fp_fusion=True, **LAUNCHES[launch],
        )  # fmt: skip
    return found
