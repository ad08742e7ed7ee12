"""Scale rules: from the largest magnitude of a tile to its scale, rule by rule.

A rule is named after who uses it; two rules of one element must not be compared bit for bit with each other.
Rules of fp32 scales are rows of `RULES`, rules of E8M0 scales rows of `MX_RULES`, with a mantissa by macro-block or
without; NVFP4 has "ct" (with "ct_token", one tensor-level scale per row) and "torchao". An all-zero tile gives zero
codes and a finite scale under every rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from harness.numerics import tiles
from harness.numerics.formats import MACRO, Format
from harness.numerics.rounding import (
    FLOAT32_INF_BITS,
    FLOAT_MAX,
    INT_BITS,
    binades,
    constant,
    decode,
    e8m0_value,
    power_of_two_at_least,
    round_float_,
)

FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT32_TINY = torch.finfo(torch.float32).tiny
SMALLEST = 2.0**-149
"""The smallest float32 above 0."""
NVFP4_RANGE = FLOAT_MAX["e4m3"] * FLOAT_MAX["e2m1"]
"""2688: the largest magnitude that a block scale and a code reach together."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """scale = max(max(amax, amax_floor) * margin / largest code, scale_floor), in float32."""

    amax_floor: float = 0.0
    scale_floor: float = 0.0
    zero_scale: float | None = None
    """The scale of an all-zero tile, where the floors do not already make it positive."""
    margin: float = 1.0
    is_half_range: bool = False
    """Integers: the largest code is (2^bits - 1) / 2, half of the range, not 2^(bits - 1) - 1."""
    is_power_of_two: bool = False
    """Rounded up to a power of two."""
    form: Literal["divide", "reciprocal", "inverse"] = "divide"
    """code = x / scale, or x * (1 / scale), or x * (largest code / amax)."""


RULES: dict[str, Rule] = {
    # vLLM csrc/quantization/w8a8/fp8/common.cu (dynamic, per tensor); the zero rule is ours, vLLM leaves 0 * inf.
    "tensor": Rule(zero_scale=1.0, form="reciprocal"),
    # vLLM model_executor/layers/quantization/online/fp8.py (channels) and its per-token kernel.
    "vllm": Rule(scale_floor=1.0 / (448.0 * 512.0)),
    # vLLM csrc per_token_group_quant.cu.
    "vllm_group": Rule(amax_floor=1e-10),
    # compressed-tensors quantization/utils/helpers.py `calculate_qparams`.
    "ct": Rule(zero_scale=FLOAT32_EPS, is_half_range=True),
    # verl utils/kernel/fp8_kernel.py, the Triton path.
    "verl": Rule(amax_floor=1e-10, form="reciprocal"),
    # verl's PyTorch path and NeMo-RL models/generation/vllm/quantization/fp8.py: 448 / amax, its inverse stored.
    "inverse": Rule(zero_scale=1.0, form="inverse"),
    # Power-of-two scales as vLLM makes for DeepGEMM: 2^ceil(log2(max(amax / 448, 1e-10))).
    "ue8m0": Rule(scale_floor=1e-10, is_power_of_two=True),
    # vLLM csrc int8/scaled_quant.cu; also the textbook weight rule. Zero rows store scale 0.
    "int_kernel": Rule(zero_scale=0.0, form="inverse"),
    # The INT4 QAT stacks (miles int4_qat/fake_int4_quant_cuda.cu): codes in +-(2^(bits - 1) - 1).
    "qat": Rule(scale_floor=1e-5),
    # FP8 KV cache; margin as in NeMo-RL's calibrated scales (`kv_scales.py`), which have no floor.
    "kv": Rule(margin=1.05, scale_floor=1e-6),
}

MX_RULES: dict[str, dict[str, int]] = {
    # What to add to the float32 bits of amax so that the exponent field becomes the one the rule wants:
    # 2^23 minus the first mantissa that moves up. OCP microscaling (floor), torchao prototype/mx_formats, CT.
    # "rceil" is exact here and in Blackwell's cvt.rp; torchao's eager path divides amax by the largest code and takes
    # log2 in float32, which keeps the lower scale up to about ten float32 steps above the bound.
    "floor": {"e2m1": 0, "e4m3": 0},
    "even": {"e2m1": 0x200000, "e4m3": 0x080000},  # m >= 1.75, m >= 1.9375
    "ceil": {"e2m1": 0x7FFFFF, "e4m3": 0x7FFFFF},  # m > 1
    "rceil": {"e2m1": 0x3FFFFF, "e4m3": 0x1FFFFF},  # m > 1.5, m > 1.75
    "ct": {"e2m1": 0x200000, "e4m3": 0x200000},  # m >= 1.75 for both
}
_MX_EMAX = {"e2m1": 2, "e4m3": 8}


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales and factors that a tensor is quantized with. Everything but `stored` broadcasts against its `tiles.split`
    view."""

    multiplier: Tensor
    """float32: value = (code - zero) * multiplier."""
    factor: Tensor | None = None
    """float32: code = x * factor; None: code = x / multiplier."""
    zero: Tensor | None = None
    """float32 integers."""
    block: Tensor
    """Stored scale per tile, still as float32; differs from `multiplier` under NVFP4 alone."""
    tensor_level: Tensor | None = None
    """NVFP4: float32, a quant multiplier under "ct" and a dequant multiplier under "torchao"."""
    is_bounded: bool = False
    """No element can round beyond the largest code."""


def int_range(fmt: Format) -> tuple[int, int]:
    """(smallest, largest) code of an integer format: -2^(b-1)..2^(b-1)-1, except the "qat" rule, which has
    +-(2^(b-1)-1) where symmetric and 0..2^b-1 where not."""
    half = 2 ** (INT_BITS[fmt.element] - 1)
    if fmt.rule != "qat":
        return -half, half - 1
    return (1 - half, half - 1) if fmt.symmetric else (0, 2 * half - 1)


def largest_code(fmt: Format) -> float:
    """The code (or half range) that a tile's largest magnitude is mapped to."""
    if fmt.element in FLOAT_MAX:
        return FLOAT_MAX[fmt.element]
    half = 2 ** (INT_BITS[fmt.element] - 1)
    return half - 0.5 if RULES[fmt.rule].is_half_range else half - 1.0


def make(
    view: Tensor, fmt: Format, scale: Tensor | None, zero_point: Tensor | None, tensor_amax: Tensor | None
) -> Scales:
    """Scales for a `tiles.split` view (float32): `scale`, spread already, where it is given, else computed."""
    if fmt.scale_dtype == "e8m0":
        return _mx(view, fmt, scale)
    if fmt.scale_dtype == "e8m0_m8":
        return _macro_blocks(view, fmt, scale)
    if fmt.scale_dtype == "e4m3":
        return _nvfp4(view, fmt, scale, tensor_amax)
    if scale is not None:
        factor = None if RULES[fmt.rule].form == "divide" else torch.where(scale == 0, 0.0, 1.0 / scale)
        return Scales(multiplier=scale, factor=factor, zero=zero_point, block=scale)
    return _symmetric(view, fmt, tensor_amax) if fmt.symmetric else _asymmetric(view, fmt)


def _symmetric(view: Tensor, fmt: Format, tensor_amax: Tensor | None) -> Scales:
    rule = RULES[fmt.rule]
    assert fmt.tile is not None
    amax = tiles.amax(view, fmt.tile) if tensor_amax is None else tensor_amax.to(torch.float32)
    # A tile's own maximum lands on the largest code but for float32 error. Not so with half a range, nor with the
    # subnormal scales that "ct" allows.
    is_bounded = tensor_amax is None and fmt.rule != "ct"
    if rule.form == "inverse":
        assert rule.zero_scale is not None
        top = constant(largest_code(fmt), view)
        factor = top / amax
        factor = torch.where(factor.isinf(), constant(rule.zero_scale, view), factor)
        # The kernel stores amax / 127; verl's PyTorch path stores the inverse of its factor.
        scale = amax / top if fmt.rule == "int_kernel" else 1.0 / factor
        return Scales(multiplier=scale, factor=factor, block=scale, is_bounded=is_bounded)
    scale = scale_of(amax, fmt)
    factor = 1.0 / scale if rule.form == "reciprocal" else None
    return Scales(multiplier=scale, factor=factor, block=scale, is_bounded=is_bounded)


def scale_of(amax: Tensor, fmt: Format) -> Tensor:
    """Scales of tiles of the largest magnitudes `amax`, float32 of any shape, under a rule that is not "inverse"."""
    rule = RULES[fmt.rule]
    if rule.amax_floor:
        amax = amax.clamp(min=rule.amax_floor)
    scale = amax / constant(largest_code(fmt), amax)
    if rule.margin != 1.0:
        scale.mul_(rule.margin)
    if rule.scale_floor:
        scale.clamp_min_(rule.scale_floor)
    if rule.zero_scale is not None:
        _lift_(scale, rule.zero_scale, below=FLOAT32_TINY if rule.form == "reciprocal" else SMALLEST)
    return power_of_two_at_least(scale) if rule.is_power_of_two else scale


def _asymmetric(view: Tensor, fmt: Format) -> Scales:
    """Integers with a zero point: (max - min) / (2^bits - 1), both ends forced to include 0.

    The QAT sources leave that out, and their zero point leaves its range in a group of one sign.
    """
    assert fmt.tile is not None
    low, high = tiles.extremes(view, fmt.tile)
    low, high = low.clamp_max_(0.0), high.clamp_min_(0.0)
    bottom, top = int_range(fmt)
    scale = (high - low) / constant(float(top - bottom), view)
    if fmt.rule == "qat":
        scale.clamp_min_(RULES["qat"].scale_floor)
        zero = (low / scale).round_().neg_().clamp_(bottom, top)
    else:
        # A zero tile has scale 0 in the source, and 0 / 0 for a zero point; here the zero point is then 0.
        zero = (
            torch.where(scale == constant(0.0, view), constant(0.0, view), bottom - low / scale)
            .clamp_(bottom, top)
            .round_()
        )
        _lift_(scale, FLOAT32_EPS, below=SMALLEST)
    return Scales(multiplier=scale, zero=zero, block=scale)


def _mx(view: Tensor, fmt: Format, scale: Tensor | None) -> Scales:
    """Microscaling: 2^X, X = E(amax) - emax in [-127, 127]; inf (byte 255, NaN) where amax is not finite."""
    assert fmt.tile is not None
    if scale is None:
        scale = _mx_power(tiles.amax(view, fmt.tile), fmt)
    return Scales(multiplier=scale, block=scale)


def _mx_power(amax: Tensor, fmt: Format) -> Tensor:
    """2^X of tiles of the largest magnitude `amax`."""
    shifted = amax * constant(2.0 ** -_MX_EMAX[fmt.element], amax)
    bits = shifted.view(torch.int32).clamp_(max=FLOAT32_INF_BITS)
    bits = bits.add_(constant(MX_RULES[fmt.rule][fmt.element], amax, torch.int32))
    return binades(bits.view(torch.float32)).clamp_min_(2.0**-127)


def macro_factors(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Scales 2^X [..., tiles] and factors 1 + mm [..., 1] of macro-blocks, by the largest magnitudes of their tiles.

    mm, of 8 bits, is the nearest to s / s* - 1 of the largest tile: s* = amax / largest code, s the power of two above
    it. Where mm is rounded up, that tile keeps s, and its largest value saturates by at most 1 / 512.
    """
    largest, top = amax.amax(-1, keepdim=True), constant(FLOAT_MAX[fmt.element], amax)
    power = _mx_power(largest, fmt)
    exact = (power * top / largest - 1.0).nan_to_num_(nan=0.0, posinf=0.0)
    factor = 1.0 + (exact * 256.0).round_().clamp_(0.0, 255.0) / 256.0
    return _mx_power(torch.minimum(amax * factor, power * top), fmt), factor


def _macro_blocks(view: Tensor, fmt: Format, scale: Tensor | None) -> Scales:
    """2^X / (1 + mm), one float32 per tile: Q((1 + mm) x) / (1 + mm)."""
    assert fmt.tile is not None
    if scale is not None:
        return Scales(multiplier=scale, block=scale)
    amax = tiles.amax(view, fmt.tile).squeeze(-1)
    count, size = amax.shape[-1], MACRO // fmt.tile[1]
    groups: Tensor = functional.pad(amax, (0, -count % size)).view(*amax.shape[:-1], -1, size)
    power, factor = macro_factors(groups, fmt)
    multiplier, inverse = (x.flatten(-2)[..., :count].unsqueeze(-1) for x in (power / factor, factor / power))
    return Scales(multiplier=multiplier, factor=inverse, block=multiplier)


def _nvfp4(view: Tensor, fmt: Format, scale: Tensor | None, tensor_amax: Tensor | None) -> Scales:
    """E4M3 scales of blocks times a float32 scale of the tensor.

    `scale` of one dimension or none is a frozen tensor-level scale in the format's own convention, under "ct_token" it
    is always of that level; otherwise it holds frozen block scales, and `tensor_amax` tells the tensor-level one.
    """
    assert fmt.tile is not None
    amax = tiles.amax(view, fmt.tile)
    is_level = scale is not None and (scale.ndim <= 1 or fmt.rule == "ct_token")
    if scale is not None and is_level:
        level = scale.reshape(()) if scale.ndim <= 1 else scale
    else:
        if tensor_amax is not None:
            largest = tensor_amax.to(torch.float32).reshape(())
        else:
            largest = amax.amax(-2, keepdim=True) if fmt.rule == "ct_token" else amax.amax()
        level = tensor_level(largest, fmt)
    if scale is not None and not is_level:
        block = scale
    elif fmt.rule == "torchao":
        block = round_float_((amax / constant(6.0, view)).div_(level).clamp_min_(2.0**-6), "e4m3")
    else:
        block = _lift_(round_float_((amax / constant(6.0, view)).mul_(level), "e4m3"), 0.125, below=SMALLEST)
    factor = (1.0 / level) / block if fmt.rule == "torchao" else None
    return Scales(multiplier=nvfp4_multiplier(block, level, fmt), factor=factor, block=block, tensor_level=level)


def tensor_level(amax: Tensor, fmt: Format) -> Tensor:
    """Tensor-level scales of NVFP4 in the format's own convention, of tensors of the largest magnitudes `amax`: float32
    of any shape."""
    if fmt.rule == "torchao":
        # Below this the factor (1 / level) / block would overflow: the tensor counts as zero.
        return _lift_(amax / constant(NVFP4_RANGE, amax), 1.0, below=2.0**-119)
    # compressed-tensors divides a number by a tensor, which torch does by a reciprocal: the last bit depends on it.
    level = amax.clamp(min=FLOAT32_TINY).reciprocal_().mul_(constant(NVFP4_RANGE, amax))
    return level.nan_to_num_(nan=1.0, posinf=1.0)


def _lift_(scale: Tensor, value: float, *, below: float) -> Tensor:
    """Add `value` in place where `scale` >= 0 lies `below` a bound so small that the sum is `value`: a third cheaper
    than a choice."""
    return scale.add_(scale < constant(below, scale), alpha=value)


def nvfp4_multiplier(block: Tensor, level: Tensor, fmt: Format) -> Tensor:
    """Effective dequant multiplier of NVFP4 blocks: float32 block scales and tensor-level scale that broadcast."""
    return block * level if fmt.rule == "torchao" else block / level


def stored_multiplier(stored: Tensor, level: Tensor | None, fmt: Format) -> Tensor:
    """Stored block scales (and the tensor-level scale) -> float32 dequant multipliers of the same shape."""
    if fmt.scale_dtype == "e8m0":
        return e8m0_value(stored.view(torch.uint8))
    if fmt.scale_dtype == "e4m3":
        assert level is not None
        return nvfp4_multiplier(decode(stored, "e4m3"), level, fmt)
    return stored
