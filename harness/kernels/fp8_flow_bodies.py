"""Triton code that quantizes an operand of the FP8 training flow (`fp8_flow.py` launches it).

A tensor is read once and leaves in both layouts that its products need: codes in runs along its rows, and codes in runs
down its columns stored transposed. The pieces are those of `quantize_bodies.py`, with its two traps.
Left out: formats other than E4M3 with float32 scales under a rule that divides, and shapes that 128 does not divide.
"""

# A jitted function is typed as the Python that it is not: scalars are `constexpr`, tuples are unpacked tensors.
# pyright: reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda.libdevice import fast_dividef

from harness.kernels.quantize_bodies import _e4m3, _magnitude, _received, _scale_and_factor, _scaled


@triton.jit
def _run_scale(amax, HAS_CAST: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr):
    """The scale of runs, max(amax, AMAX_FLOOR) / TOP to nearest, by a corrected product as in `_quotient`."""
    amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    top = tl.full(amax.shape, TOP, tl.float32)
    if HAS_CAST:
        part = tl.full(amax.shape, 1.0 / TOP, tl.float32)
        scale = amax * part
        scale = tl.fma(tl.fma(scale, top, amax * -1.0), part * -1.0, scale)
        scale = tl.where(amax == float("inf"), amax, scale)
    else:
        scale = tl.div_rn(amax, top)
    return scale


@triton.jit
def _quotient(x, scale, HAS_CAST: tl.constexpr):
    """x / scale, to nearest, for a bf16 x and a normal scale.

    A product with an inverse that is good to two units in the last place (`div.approx`), corrected once by what it
    leaves of x, has the bits of `div_rn` in a fifth of its instructions: tests/engines/vllm/test_flow_kernels.py shows
    it for every pair of mantissas. The signs of the correction keep -0; under an infinite scale it is left out. The
    interpreter's fma rounds twice, so there it is the division itself.
    """
    if HAS_CAST:
        inverse = fast_dividef(tl.full(scale.shape, 1.0, tl.float32), scale)
        finite = tl.where(scale == float("inf"), 0.0, scale)
        v = x * inverse
        v = tl.fma(tl.fma(v, finite, x * -1.0), inverse * -1.0, v)
    else:
        v = tl.div_rn(x, scale)
    return v


@triton.jit
def _on_grid(v):
    """v rounded to an e4m3 number, as float32, by the addition that leaves three mantissa bits; -0 becomes +0.

    A run's own largest magnitude bounds it: nothing saturates.
    """
    binade = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(binade, 0.015625) * 1572864.0
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
def _four(a, b, c, d):
    """Four [32, 1] columns -> [128], the first element of each first."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [128])


@triton.jit
def _word(a, b, c, d, scale, HAS_CAST: tl.constexpr):
    """Four codes in an int32, the first in its lowest bits."""
    low = _code(a, scale, HAS_CAST) | (_code(b, scale, HAS_CAST) << 8)
    return low | (_code(c, scale, HAS_CAST) << 16) | (_code(d, scale, HAS_CAST) << 24)


@triton.jit
def _code(x, scale, HAS_CAST: tl.constexpr):
    return _e4m3(_quotient(x, scale, HAS_CAST), HAS_CAST).to(tl.int32)


# A tile comes as four tiles of every fourth token, so that four neighbours along the tokens meet in one thread: what is
# then turned through shared memory is words, a quarter of the accesses that bytes would take.
# T changes from batch to batch: kernels that assume something of it would be compiled again and again.
@triton.jit(do_not_specialize=["tokens", "blocks"])
def runs_kernel(
    X, ROWS, ROW_SCALE, COLUMNS, COLUMN_SCALE, tokens, blocks, channels, x_t, x_c, HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, IS_TWICE: tl.constexpr, IS_SQUARE: tl.constexpr, BASE: tl.constexpr,
    HAS_CAST: tl.constexpr, TOP: tl.constexpr, AMAX_FLOOR: tl.constexpr,
):  # fmt: skip
    """128 tokens x 128 channels of X: 128 runs along the channels, 128 along the tokens.

    T is `blocks` tiles of 128. ROWS uint8 [T, C], ROW_SCALE [C / 128, T], COLUMNS int32 [C, T / 4] of four tokens each
    and COLUMN_SCALE [T / 128, C] are contiguous; `channels` is C. IS_TWICE: the second 128 are made from what the first
    stand for. IS_SQUARE: they share one scale, COLUMN_SCALE [C / 128, T / 128].
    """
    at, wide = tl.program_id(0), channels.to(tl.int64)
    four = (tl.program_id(1) * 32 + tl.arange(0, 32)).to(tl.int64)[:, None]
    c = (at * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    given = ()  # Triton has no starred tuples
    for j in tl.static_range(4):
        token = four * 4 + j
        x = _received(X + token * x_t + c * x_c, (token < tokens) & (c < channels), BASE)
        given = given + (x,)  # noqa: RUF005
    kept, scales, top = (), (), tl.zeros([32, 128], tl.int32)
    for j in tl.static_range(4):
        x = given[j]
        if HAS_ROWS or IS_TWICE:
            amax = tl.max(_magnitude(x), 1, keep_dims=True).to(tl.float32, bitcast=True)
            scale = _run_scale(amax, HAS_CAST, TOP, AMAX_FLOOR)
            v = _quotient(x, scale, HAS_CAST)
            scales = scales + (scale,)  # noqa: RUF005
            if HAS_ROWS:
                tl.store(ROWS + (four * 4 + j) * wide + c, _e4m3(v, HAS_CAST))
            if IS_TWICE:
                x = _bf16(_on_grid(v) * scale, HAS_CAST)
        top = tl.maximum(top, _magnitude(x))
        kept = kept + (x,)  # noqa: RUF005
    if HAS_ROWS:
        t = at.to(tl.int64) * (blocks * 128) + tl.program_id(1) * 128 + tl.arange(0, 128)
        tl.store(ROW_SCALE + t, _four(scales[0], scales[1], scales[2], scales[3]))
    if HAS_COLUMNS:
        amax = tl.max(top, 0, keep_dims=True)
        if IS_SQUARE:
            amax = tl.max(amax, 1, keep_dims=True)
        scale = _run_scale(amax.to(tl.float32, bitcast=True), HAS_CAST, TOP, AMAX_FLOOR)
        word = _word(kept[0], kept[1], kept[2], kept[3], scale, HAS_CAST)
        tl.store(COLUMNS + c * (blocks * 32) + four, word)
        if IS_SQUARE:
            tl.store(COLUMN_SCALE + at.to(tl.int64) * blocks + tl.program_id(1) + tl.zeros([1, 1], tl.int32), scale)
        else:
            tl.store(COLUMN_SCALE + tl.program_id(1).to(tl.int64) * wide + c, scale)


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
