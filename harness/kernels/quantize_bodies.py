"""Triton code that quantizes a weight (`quantize.py` launches it): loads, scales, roundings, stores.

Plain Triton without library calls, so that the interpreter computes the same bits. Two traps shape it: `/` of float32
is approximate on a GPU (hence `div_rn`), and a product and a sum become one rounding unless the launch forbids it.
Left out: choosing a kernel, checking arguments.
"""

# A jitted function is typed as the Python that it is not: scalars are `constexpr`, tuples are unpacked tensors.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _received(pointers, mask, BASE: tl.constexpr):
    """Values as an engine of that base dtype would hold them, in float32."""
    given = tl.load(pointers, mask=mask, other=0.0)
    x = given.to(tl.float32)
    if tl.bfloat16 == BASE:
        if given.dtype != tl.bfloat16:
            # By hand: the interpreter's own cast cuts the bits off.
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    else:
        x = x.to(BASE).to(tl.float32)
    return x


@triton.jit
def _magnitude(x):
    """|x| as int32 bits, which order as the numbers do, NaN above inf: an integer maximum keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_and_factor(amax, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, ZERO: tl.constexpr,
                      ZERO_BELOW: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """`scales._symmetric`: (stored scale, factor of the values; the scale itself for division)."""
    top = tl.full(amax.shape, TOP, tl.float32)
    one = tl.full(amax.shape, 1.0, tl.float32)
    if FORM == "inverse" or FORM == "kernel":
        factor = tl.div_rn(top, amax)
        factor = tl.where(factor == float("inf"), ZERO, factor)
        scale = tl.div_rn(amax, top) if FORM == "kernel" else tl.div_rn(one, factor)
    else:
        scale = tl.div_rn(tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax), top)
        scale = tl.where(scale < SCALE_FLOOR, SCALE_FLOOR, scale)
        if ZERO != 0.0:
            scale = tl.where(scale < ZERO_BELOW, ZERO, scale)
        factor = tl.div_rn(one, scale) if FORM == "reciprocal" else scale
    return scale, factor


@triton.jit
def _given_factor(scale, FORM: tl.constexpr):
    """The factor under a scale that somebody else chose; a zero scale gives zero codes, but for division."""
    scale = scale.to(tl.float32)
    if FORM == "divide":
        factor = scale
    else:
        factor = tl.where(scale == 0.0, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    return factor


@triton.jit
def _scaled(x, factor, FORM: tl.constexpr):
    if FORM == "divide":
        v = tl.div_rn(x, factor)
    else:
        v = x * factor
    return v


@triton.jit
def _e4m3(v, HAS_CAST: tl.constexpr):
    """float32 -> e4m3 bytes, to nearest with ties to even, saturating; NaN stays NaN and zeros keep their sign."""
    if HAS_CAST:
        codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Exponent and mantissa in one number: 20 bits go, and the bias falls from 127 to 7. Below 2^-6 the grid is 2^-9
        # wide, as float32 is at 2^14.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        small = (tl.abs(v) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        codes = (tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def _e2m1(v):
    """float32 -> int32 codes 0..15 of e2m1, to nearest with ties to even, saturating; the sign is bit 3."""
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - 252
    small = (tl.abs(v) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.minimum(tl.where(size < 0x3F800000, small, normal), 7) | ((bits >> 28) & 8)


@triton.jit
def _integer(v, LOW: tl.constexpr, HIGH: tl.constexpr):
    """float32 -> int32 in LOW..HIGH, to nearest with ties to even: float32 has steps of 1 at 1.5 * 2^23."""
    v = tl.minimum(tl.maximum(v, LOW), HIGH)
    return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _byte(v, IS_INT: tl.constexpr, HAS_CAST: tl.constexpr):
    if IS_INT:
        codes = _integer(v, -128.0, 127.0).to(tl.int8)
    else:
        codes = _e4m3(v, HAS_CAST)
    return codes


@triton.jit
def block_kernel(
    W, OUT, S, rows, columns, w_n, w_k, o_n, o_k, s_n, s_k, BASE: tl.constexpr, IS_GIVEN: tl.constexpr,
    HAS_CAST: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, ZERO: tl.constexpr,
    ZERO_BELOW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """One 128 x 128 tile, in registers between its one read and its one write; FP8."""
    n = (tl.program_id(1) * 128 + tl.arange(0, 128)).to(tl.int64)[:, None]
    k = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    mask = (n < rows) & (k < columns)
    x = _received(W + n * w_n + k * w_k, mask, BASE)
    at = S + tl.program_id(1) * s_n + tl.program_id(0) * s_k + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    if IS_GIVEN:
        factor = _given_factor(tl.load(at), FORM)
    else:
        amax = tl.max(tl.max(_magnitude(x), 1, keep_dims=True), 0, keep_dims=True).to(tl.float32, bitcast=True)
        scale, factor = _scale_and_factor(amax, TOP, AMAX_FLOOR, SCALE_FLOOR, ZERO, ZERO_BELOW, FORM)
        tl.store(at, scale)
    tl.store(OUT + n * o_n + k * o_k, _e4m3(_scaled(x, factor, FORM), HAS_CAST), mask=mask)


@triton.jit
def row_kernel(
    W, OUT, S, columns, w_n, w_k, o_n, o_k, s_n, BASE: tl.constexpr, IS_GIVEN: tl.constexpr, IS_INT: tl.constexpr,
    HAS_CAST: tl.constexpr, IS_SINGLE: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr, ZERO: tl.constexpr, ZERO_BELOW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """One row; FP8 or INT8. IS_SINGLE: it stays in BLOCK registers, else it is read again for the codes."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK).to(tl.int64)
    at = S + n * s_n + tl.arange(0, 1)
    W += n * w_n
    OUT += n * o_n
    x = _received(W + k * w_k, k < columns, BASE)
    if IS_GIVEN:
        factor = _given_factor(tl.load(at), FORM)
    else:
        size = _magnitude(x)
        if not IS_SINGLE:
            for start in range(BLOCK, columns, BLOCK):
                size = tl.maximum(size, _magnitude(_received(W + (start + k) * w_k, start + k < columns, BASE)))
        amax = tl.max(size, 0, keep_dims=True).to(tl.float32, bitcast=True)
        scale, factor = _scale_and_factor(amax, TOP, AMAX_FLOOR, SCALE_FLOOR, ZERO, ZERO_BELOW, FORM)
        tl.store(at, scale)
    tl.store(OUT + k * o_k, _byte(_scaled(x, factor, FORM), IS_INT, HAS_CAST), mask=k < columns)
    if not IS_SINGLE:
        for start in range(BLOCK, columns, BLOCK):
            more = _received(W + (start + k) * w_k, start + k < columns, BASE)
            codes = _byte(_scaled(more, factor, FORM), IS_INT, HAS_CAST)
            tl.store(OUT + (start + k) * o_k, codes, mask=start + k < columns)


@triton.jit
def group_kernel(
    W, OUT, S, rows, columns, words, groups, w_n, w_k, o_n, o_k, s_n, s_k, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BASE: tl.constexpr, IS_GIVEN: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr, ZERO: tl.constexpr, ZERO_BELOW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS values in groups along the row; INT4, eight codes in an int32, the first in its lowest bits."""
    n = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    g = (tl.program_id(0) * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)).to(tl.int64)[None, :]
    mask = (n < rows) & (k < columns)
    x = tl.reshape(_received(W + n * w_n + k * w_k, mask, BASE), [ROWS, COLUMNS // GROUP, GROUP])
    at, is_group = S + n * s_n + g * s_k, (n < rows) & (g < groups)
    if IS_GIVEN:
        factor = _given_factor(tl.load(at, mask=is_group, other=1.0), FORM)
    else:
        amax = tl.max(_magnitude(x), 2).to(tl.float32, bitcast=True)
        scale, factor = _scale_and_factor(amax, TOP, AMAX_FLOOR, SCALE_FLOOR, ZERO, ZERO_BELOW, FORM)
        tl.store(at, scale, mask=is_group)
    codes = tl.reshape(_integer(_scaled(x, factor[:, :, None], FORM), -8.0, 7.0) + 8, [ROWS, COLUMNS])
    codes = tl.reshape(tl.where(mask, codes, 0), [ROWS, COLUMNS // 8, 8])
    packed = tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], 2)
    k = (tl.program_id(0) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)).to(tl.int64)[None, :]
    tl.store(OUT + n * o_n + k * o_k, packed, mask=(n < rows) & (k < words))


@triton.jit
def nvfp4_kernel(
    W, OUT, S, LEVEL, rows, columns, words, groups, w_n, w_k, o_n, o_k, s_n, s_k, HAS_CAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS values in blocks of 16; E2M1, two codes in a byte, the even one in its low half."""
    n = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    g = (tl.program_id(0) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)).to(tl.int64)[None, :]
    x = tl.reshape(_received(W + n * w_n + k * w_k, (n < rows) & (k < columns), BASE), [ROWS, COLUMNS // 16, 16])
    amax = tl.max(_magnitude(x), 2).to(tl.float32, bitcast=True)
    level = tl.load(LEVEL + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :])
    # The block scale on the e4m3 grid, by the addition that leaves three mantissa bits; `rounding.round_float_`.
    block = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)) * level
    block = tl.where(block > 448.0, 448.0, block)
    binade = (block.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.where(binade < 0.015625, 0.015625, binade) * 1572864.0
    block = (block + shift) - shift
    block = tl.where(block == 0.0, 0.125, block)
    tl.store(S + n * s_n + g * s_k, _e4m3(block, HAS_CAST), mask=(n < rows) & (g < groups))
    codes = _e2m1(tl.div_rn(x, tl.div_rn(block, level)[:, :, None]))
    codes = tl.reshape(codes, [ROWS, COLUMNS // 2, 2])
    packed = tl.sum(codes << (tl.arange(0, 2) * 4)[None, None, :], 2).to(tl.uint8)
    k = (tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)).to(tl.int64)[None, :]
    tl.store(OUT + n * o_n + k * o_k, packed, mask=(n < rows) & (k < words))


@triton.jit
def amax_kernel(W, AMAX, columns, w_n, w_k, BASE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest magnitude of a stretch of one row, joined to that of all the others."""
    n = tl.program_id(0).to(tl.int64)
    k = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    tl.atomic_max(AMAX, tl.max(_magnitude(_received(W + n * w_n + k * w_k, k < columns, BASE)), 0))
