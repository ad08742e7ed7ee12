"""What the GPU runs when an operand of the FP8 training flow is quantized (`flow_kernels.py` launches it).

A tensor is read once and leaves in both layouts that its products need: codes in runs along its rows, and codes in runs
down its columns stored transposed. The pieces are those of `kernel_bodies.py`, with its two traps.
Left out: formats other than E4M3 with float32 scales under a rule that divides, and shapes that 128 does not divide.
"""

# A jitted function is typed as the Python that it is not: scalars are `constexpr`, tuples are unpacked tensors.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from harness.engines.vllm.kernel_bodies import _e4m3, _magnitude, _received, _scale_and_factor, _scaled


@triton.jit
def _run_scale(amax, HAS_CAST: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr):
    """The scale of runs, max(amax, AMAX_FLOOR) / TOP to nearest, by a corrected product as in `_quotient`."""
    amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    top = tl.full(amax.shape, TOP, tl.float32)
    if HAS_CAST:
        part = tl.full(amax.shape, 1.0 / TOP, tl.float32)
        scale = amax * part
        scale = tl.fma(tl.fma(scale, top, -amax), part * -1.0, scale)
        scale = tl.where(amax == float("inf"), amax, scale)
    else:
        scale = tl.div_rn(amax, top)
    return scale


@triton.jit
def _quotient(x, scale, HAS_CAST: tl.constexpr):
    """x / scale, to nearest, for a bf16 x and a normal scale.

    A product with an inverse that is good to two units in the last place (`/` on a GPU), corrected once by what it
    leaves of x, has the bits of `div_rn` in a fifth of its instructions: tests/engines/test_vllm_flow_kernels.py shows
    it for every pair of mantissas. The signs of the correction keep -0; under an infinite scale it is left out. The
    interpreter's fma rounds twice, so there it is the division itself.
    """
    if HAS_CAST:
        inverse = 1.0 / scale
        finite = tl.where(scale == float("inf"), 0.0, scale)
        v = x * inverse
        v = tl.fma(tl.fma(v, finite, -x), inverse * -1.0, v)
    else:
        v = tl.div_rn(x, scale)
    return v


@triton.jit
def _on_grid(v):
    """v rounded to an e4m3 number, as float32, by the addition that leaves three mantissa bits; -0 becomes +0.

    A run's own largest magnitude bounds it: nothing saturates.
    """
    binade = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.where(binade < 0.015625, 0.015625, binade) * 1572864.0
    return (v + shift) - shift


@triton.jit
def _bf16(x, HAS_CAST: tl.constexpr):
    """float32 rounded to bf16 and back; by hand in the interpreter, whose own cast cuts the bits off."""
    if HAS_CAST:
        x = x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x


@triton.jit
def runs_kernel(
    X, ROWS, ROW_SCALE, COLUMNS, COLUMN_SCALE, tokens, padded, channels, x_t, x_c, HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, IS_TWICE: tl.constexpr, BASE: tl.constexpr, HAS_CAST: tl.constexpr, TOP: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
):  # fmt: skip
    """128 tokens x 128 channels of X [tokens, channels]: 128 runs along the channels, 128 along the tokens.

    ROWS [padded, channels], COLUMNS [channels, padded], ROW_SCALE [channels / 128, padded] and COLUMN_SCALE
    [padded / 128, channels] are contiguous. IS_TWICE: the second 128 are made from what the first stand for.
    """
    t = (tl.program_id(1) * 128 + tl.arange(0, 128)).to(tl.int64)[:, None]
    c = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    x = _received(X + t * x_t + c * x_c, (t < tokens) & (c < channels), BASE)
    if HAS_ROWS or IS_TWICE:
        amax = tl.max(_magnitude(x), 1, keep_dims=True).to(tl.float32, bitcast=True)
        scale = _run_scale(amax, HAS_CAST, TOP, AMAX_FLOOR)
        v = _quotient(x, scale, HAS_CAST)
        if HAS_ROWS:
            tl.store(ROWS + t * channels + c, _e4m3(v, HAS_CAST))
            tl.store(ROW_SCALE + tl.program_id(0).to(tl.int64) * padded + t, scale)
        if IS_TWICE:
            x = _bf16(_on_grid(v) * scale, HAS_CAST)
    if HAS_COLUMNS:
        amax = tl.max(_magnitude(x), 0, keep_dims=True).to(tl.float32, bitcast=True)
        scale = _run_scale(amax, HAS_CAST, TOP, AMAX_FLOOR)
        v = _quotient(x, scale, HAS_CAST)
        tl.store(COLUMNS + c * padded + t, _e4m3(v, HAS_CAST))
        tl.store(COLUMN_SCALE + tl.program_id(1).to(tl.int64) * channels + c, scale)


@triton.jit
def square_kernel(
    W, OUT, OUT_SCALE, TURNED, TURNED_SCALE, rows, columns, w_n, w_k, BASE: tl.constexpr, HAS_CAST: tl.constexpr,
    TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, ZERO: tl.constexpr,
    ZERO_BELOW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """One 128 x 128 tile of a weight [rows, columns]; its codes and its scale go to W and to W transposed."""
    n = (tl.program_id(1) * 128 + tl.arange(0, 128)).to(tl.int64)[:, None]
    k = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    x = _received(W + n * w_n + k * w_k, (n < rows) & (k < columns), BASE)
    amax = tl.max(tl.max(_magnitude(x), 1, keep_dims=True), 0, keep_dims=True).to(tl.float32, bitcast=True)
    scale, factor = _scale_and_factor(amax, TOP, AMAX_FLOOR, SCALE_FLOOR, ZERO, ZERO_BELOW, FORM)
    codes = _e4m3(_scaled(x, factor, FORM), HAS_CAST)
    tl.store(OUT + n * columns + k, codes)
    tl.store(TURNED + k * rows + n, codes)
    one = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    tl.store(OUT_SCALE + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0) + one, scale)
    tl.store(TURNED_SCALE + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1) + one, scale)
