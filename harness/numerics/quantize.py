"""Quantize and dequantize any format: tiles, scales and rounding put together.

Everything is computed in float32 on the tensor's device. Quantizing from a float32 master gives other codes than
from its bf16 cast: pass the tensor that the engine would see. No gradient flows (`linear.ste` has one).
Left out: packing (`packing.py`), calibration, and methods that change the weights first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics import nf4, scales, tiles
from harness.numerics.formats import Format
from harness.numerics.rounding import CASTS, FLOAT_EDGE, FLOAT_MAX, decode, e8m0_byte, e8m0_value, encode_, round_float_

_MERGED_SCALE = ("tensor", "ct", "torchao")


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized tensor before packing."""

    codes: Tensor
    """[..., N, K]: the plain cast itself; float8 codes; int8 (uint8 for unsigned codes); uint8 with one 4-bit code
    per byte for e2m1 and nf4."""
    scale: Tensor | None
    """float32, float8_e4m3fn (NVFP4) or float8_e8m0fnu (MX; with macro-blocks float32, 2^X / (1 + mm)), shaped as in
    `tiles.py`; NF4: flat, one per 64 values, uint8 indices where doubly quantized. None: a plain cast."""
    zero_point: Tensor | None
    """Asymmetric integers: shaped as `scale`, dtype as `codes`. NF4 with double quantization: the float32 offset []."""
    global_scale: Tensor | None
    """NVFP4: float32 [], 2688 / amax ("ct") or amax / 2688 ("torchao"). Doubly quantized NF4: absmax of the scales."""
    fmt: Format
    shape: tuple[int, ...]


def quantize(
    w: Tensor,
    fmt: Format,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Quantized:
    """`w` [..., N, K] of any float dtype, not empty -> its codes and scales under `fmt`.

    `scale` (with `zero_point` where asymmetric): use these stored scales instead of computing them. For NVFP4 a scalar
    is the tensor-level scale, whose block scales stay dynamic; with a level per token it is the levels [..., N, 1].
    `tensor_amax`: float32 [], largest magnitude of the merged group that shares a tensor-level scale
    (`has_tensor_scale`). Raises ValueError where a scale does not fit.
    """
    w = w.detach()
    if fmt.tile is None:
        return Quantized(codes=w.to(CASTS[fmt.element]), scale=None, zero_point=None, global_scale=None, fmt=fmt,
                         shape=tuple(w.shape))  # fmt: skip
    w = w.float()
    if fmt.element == "nf4":
        codes, absmax, offset, outer = nf4.quantize_nf4(w, fmt.double_quant, scale)
        return Quantized(
            codes=codes, scale=absmax, zero_point=offset, global_scale=outer, fmt=fmt, shape=tuple(w.shape)
        )
    v, s = _scaled(w, fmt, scale, zero_point, tensor_amax)
    codes = _encode_(v, fmt)
    stored = tiles.store(s.block, fmt.tile)
    if fmt.scale_dtype == "e4m3":
        stored = stored.to(torch.float8_e4m3fn)
    elif fmt.scale_dtype == "e8m0":
        stored = e8m0_byte(stored).view(torch.float8_e8m0fnu)
    level = s.tensor_level
    return Quantized(
        codes=tiles.join(codes, fmt.tile, w.shape),
        scale=stored,
        zero_point=None if s.zero is None else tiles.store(s.zero, fmt.tile).to(codes.dtype),
        global_scale=level.squeeze(-1) if level is not None and level.ndim else level,
        fmt=fmt,
        shape=tuple(w.shape),
    )


def dequantize(q: Quantized) -> Tensor:
    """The float32 values [..., N, K] that `q` stands for."""
    fmt = q.fmt
    if fmt.tile is None:
        return q.codes.to(torch.float32)
    assert q.scale is not None
    if fmt.element == "nf4":
        return nf4.dequantize_nf4(q.codes, q.scale, q.zero_point, q.global_scale)
    multiplier = scales.stored_multiplier(q.scale, q.global_scale, fmt)
    values = tiles.split(decode(q.codes, fmt.element), fmt.tile)
    if q.zero_point is not None:
        values.sub_(tiles.spread(q.zero_point.to(torch.float32), fmt.tile, q.shape))
    return tiles.join(values.mul_(tiles.spread(multiplier, fmt.tile, q.shape)), fmt.tile, q.shape)


def fake_quantize(x: Tensor, fmt: Format, *, scale: Tensor | None = None, zero_point: Tensor | None = None) -> Tensor:
    """`dequantize(quantize(x, fmt, scale=scale))` in few operations: float32 of the same shape, equal in value
    (the sign of a zero may differ)."""
    x = x.detach()
    if fmt.tile is None:
        return x.to(CASTS[fmt.element]).to(torch.float32)
    x = x.float()
    if fmt.element == "nf4":
        return dequantize(quantize(x, fmt, scale=scale))
    v, s = _scaled(x, fmt, scale, zero_point, None)
    if fmt.element in FLOAT_MAX:
        round_float_(v, fmt.element, s.is_bounded)
    else:
        v.round_()
        if not s.is_bounded:
            v.clamp_(*scales.int_range(fmt))
        if s.zero is not None:
            v.sub_(s.zero)
    return tiles.join(v.mul_(s.multiplier), fmt.tile, x.shape)


def receiver_scale(q: Quantized) -> Tensor:
    """The scale to send beside `dequantize(q)` so that `quantize(values, fmt, scale=...)` returns the codes of `q`.

    That holds even after the values went through bf16, but for 8 bits with a zero point: bf16 moves a value by up to
    1/256 of itself, half a step from 128 steps on. It is the stored scale, for NVFP4 the tensor-level one (or those of
    the tokens), from which the receiver computes the block scales again. There it holds where those are normal E4M3
    numbers: a block below 1/28672 of the largest magnitude has a subnormal one, which its values do not tell. Raises
    ValueError for plain casts and for doubly quantized NF4, which have none to send.
    """
    if q.scale is None or q.fmt.double_quant:
        raise ValueError(f"format {q.fmt.name} has no scale to send; choose one with a tile and a plain scale")
    return q.scale if q.global_scale is None else q.global_scale


def has_tensor_scale(fmt: Format) -> bool:
    """True where one scale covers the whole tensor: merged layers (q, k, v; gate, up) must share its `tensor_amax`."""
    return (fmt.tile == (0, 0) or fmt.scale_dtype == "e4m3") and fmt.rule in _MERGED_SCALE


def merged_amax(weights: Sequence[Tensor], fmt: Format) -> Tensor | None:
    """Largest magnitude, float32 [], of `weights` of any shape and float dtype that engines merge; None where `fmt` has
    no scale of the whole tensor for them to share."""
    return torch.stack([w.detach().abs().amax() for w in weights]).amax().float() if has_tensor_scale(fmt) else None


def saturated_frac(w: Tensor, q: Quantized) -> float:
    """Fraction of `w` [..., N, K] beyond the largest code of `q` by more than half a step: clipped, not rounded.

    0 for plain casts and NF4. Read it where scales are frozen; dynamic scales clip by design only under some MX rules.
    """
    fmt = q.fmt
    if fmt.tile is None or fmt.element == "nf4":
        return 0.0
    assert q.scale is not None
    multiplier = scales.stored_multiplier(q.scale, q.global_scale, fmt)
    v = tiles.split(w.detach().to(torch.float32), fmt.tile) / tiles.spread(multiplier, fmt.tile, q.shape)
    if q.zero_point is not None:
        v = v + tiles.spread(q.zero_point.to(torch.float32), fmt.tile, q.shape)
    low, high = _limits(fmt)
    # A tile's own maximum divided by its scale may exceed a tie by float32 error: that is not saturation.
    beyond = (v > high + abs(high) * 1e-4) | (v < low - abs(low) * 1e-4)
    return float(tiles.join(beyond, fmt.tile, q.shape).to(torch.float32).mean())


def code_flips(a: Quantized, b: Quantized) -> Tensor:
    """Fraction [] float32 of elements whose code differs between two quantizations of one shape and element; +0 and
    -0 are equal.

    Scales do not count. Raises ValueError where shape or element differ.
    """
    if a.shape != b.shape or a.fmt.element != b.fmt.element:
        raise ValueError(f"cannot compare {a.fmt.name} {a.shape} with {b.fmt.name} {b.shape}")
    sign = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x08}.get(a.fmt.element)
    if sign is None:
        return (a.codes != b.codes).to(torch.float32).mean()
    x, y = a.codes.view(torch.uint8), b.codes.view(torch.uint8)
    differs = (x != y) & (((x | y) & (sign - 1)) != 0)
    return differs.to(torch.float32).mean()


def _scaled(
    x: Tensor, fmt: Format, scale: Tensor | None, zero_point: Tensor | None, tensor_amax: Tensor | None
) -> tuple[Tensor, scales.Scales]:
    """(fresh tensor of values in units of the code, by tiles and with the zero point added; the scales)."""
    tile = fmt.tile
    assert tile is not None
    view = tiles.split(x, tile)
    if scale is not None:
        scale = _spread_given(scale, fmt, x.shape)
    if zero_point is not None:
        if scale is None or fmt.symmetric:
            raise ValueError(f"format {fmt.name}: a zero_point goes with the given scale of an asymmetric format")
        zero_point = tiles.spread(zero_point.to(torch.float32), tile, x.shape)
    elif scale is not None and not fmt.symmetric:
        raise ValueError(f"format {fmt.name} needs a zero_point beside its scale")
    s = scales.make(view, fmt, scale, zero_point, tensor_amax)
    v = view / s.multiplier if s.factor is None else view * s.factor
    if s.zero is not None:
        v = (v.round_() if fmt.rule == "qat" else v).add_(s.zero)
    return v, s


def _spread_given(scale: Tensor, fmt: Format, shape: torch.Size) -> Tensor:
    assert fmt.tile is not None
    if fmt.scale_dtype == "e4m3":
        level = scale.to(torch.float32)
        if fmt.rule == "ct_token" and scale.ndim > 1:
            if scale.dtype != torch.float32 or scale.shape != (*shape[:-1], 1):
                raise ValueError(
                    f"format {fmt.name}: scale {tuple(scale.shape)} {str(scale.dtype).removeprefix('torch.')} is not "
                    f"the levels of its tokens (choose float32 {(*shape[:-1], 1)}); block scales cannot be given"
                )
            return level.unsqueeze(-1)
        return level if scale.ndim <= 1 else tiles.spread(level, fmt.tile, shape)
    if fmt.scale_dtype == "e8m0":
        return tiles.spread(e8m0_value(scale.view(torch.uint8)), fmt.tile, shape)
    return tiles.spread(scale.to(torch.float32), fmt.tile, shape)


def _encode_(v: Tensor, fmt: Format) -> Tensor:
    if fmt.element in FLOAT_MAX:
        return encode_(v, fmt.element)
    low, high = scales.int_range(fmt)
    return v.round_().clamp_(low, high).to(torch.uint8 if low == 0 else torch.int8)


def _limits(fmt: Format) -> tuple[float, float]:
    """Limits beyond which rounding would leave the codes: half a step beyond the smallest and the largest one."""
    if fmt.element in FLOAT_MAX:
        return -FLOAT_EDGE[fmt.element], FLOAT_EDGE[fmt.element]
    low, high = scales.int_range(fmt)
    return low - 0.5, high + 0.5
