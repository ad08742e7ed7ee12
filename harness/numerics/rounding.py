"""Rounding to the elements themselves: no scales, no tiles.

Every cast rounds to nearest, ties to even, and clamps first: libraries differ in what they make of values beyond the
largest code (saturate, NaN or inf), so nothing here depends on it. NaN stays NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from harness.numerics.formats import Element

CASTS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Elements that are a dtype of torch and no quantization."""
FLOAT_MAX: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""Largest finite magnitude of each small float (OCP 8-bit and microscaling specifications)."""
FLOAT_EDGE: dict[str, float] = {"e4m3": 464.0, "e5m2": 61440.0, "e2m1": 7.0}
"""Half a step beyond it: magnitudes above are clipped, not rounded."""
INT_BITS: dict[str, int] = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_GRIDS: dict[str, tuple[int, float]] = {"e4m3": (3, 2.0**-6), "e5m2": (2, 2.0**-14), "e2m1": (1, 1.0)}
"""(mantissa bits, smallest normal number)."""
FLOAT32_INF_BITS = 0x7F800000
"""Bits of inf, which are those of the exponent."""
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def cast_name(dtype: torch.dtype) -> str:
    """Name of the element that is this dtype; torch's own name for any other dtype."""
    names = {cast: name for name, cast in CASTS.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def constant(value: float, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`value` as a tensor of no dimension on the device of `like`, made once.

    Small tensors spend half of an operation's time on wrapping a Python number. On a GPU, torch divides by a number (or
    a CPU tensor) as a product with its reciprocal, which moves the last bit; a tensor of the device divides truly.
    """
    return _constant(value, dtype, like.device)


@lru_cache(maxsize=512)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def round_float_(v: Tensor, element: Element, is_bounded: bool = False) -> Tensor:
    """Round float32 `v` in place to the e4m3, e5m2 or e2m1 grid, as float32; saturates; -0 may become +0.

    Equals a cast there and back, but takes a third of its time on a CPU. Adding and taking away 1.5 * 2^(23 - mantissa
    bits) times the binade of |v| leaves exactly the bits that the element keeps: the addition itself rounds.
    `is_bounded`: no |v| is beyond the largest code by half a step, so that there is nothing to saturate.
    """
    mantissa, smallest = _GRIDS[element]
    if not is_bounded:
        v.clamp_(-FLOAT_MAX[element], FLOAT_MAX[element])
    binade = binades(v).clamp_min_(smallest)
    shift = 1.5 * 2.0 ** (23 - mantissa)
    return v.add_(binade, alpha=shift).sub_(binade, alpha=shift)


def binades(v: Tensor) -> Tensor:
    """2^floor(log2 |v|) of float32 `v`, by its exponent bits: 0 where |v| is 0 or subnormal, inf where inf or NaN."""
    return torch.bitwise_and(v.view(torch.int32), constant(FLOAT32_INF_BITS, v, torch.int32)).view(torch.float32)


def encode_(v: Tensor, element: Element) -> Tensor:
    """Float32 `v`, already divided by its scale -> codes of a small float. Overwrites `v`.

    e4m3 and e5m2 give the float8 dtype; e2m1 gives uint8 with one 4-bit code per byte, the sign in bit 3 (-0 is 8).
    """
    if element in _FLOAT8:
        return v.clamp_(-FLOAT_MAX[element], FLOAT_MAX[element]).to(_FLOAT8[element])
    assert element == "e2m1"
    codes = torch.signbit(v).view(torch.uint8).mul_(constant(8, v, torch.uint8))
    magnitude = round_float_(v, element).abs_()
    # Magnitudes 0 .5 1 1.5 2 3 4 6 have codes 0..7: a concave curve of three straight pieces, cheaper than a look-up.
    low = torch.minimum(magnitude + magnitude, magnitude + constant(2.0, v))
    high = torch.add(constant(4.0, v), magnitude, alpha=0.5)
    return codes.add_(torch.minimum(low, high, out=low).to(torch.uint8))


def decode(codes: Tensor, element: Element) -> Tensor:
    """Codes of any element (see `encode_`; int codes are int8 or uint8) -> float32 of the same shape."""
    if element in ("e4m3", "e2m1"):
        table = code_values(element, codes.device)
        return table.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)
    return codes.to(torch.float32)


@lru_cache(maxsize=32)
def code_values(element: Element, device: torch.device) -> Tensor:
    """Float32 value of every e4m3 (256) or e2m1 (16) code on `device`. A look-up beats torch's CPU cast fourfold."""
    with torch.inference_mode(False):
        if element == "e4m3":
            return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
        assert element == "e2m1"
        positive = torch.tensor(_E2M1_VALUES, dtype=torch.float32)
        return torch.cat((positive, -positive)).to(device)


def power_of_two_at_least(s: Tensor) -> Tensor:
    """The smallest power of two >= `s`: positive normal float32 of any shape, by its exponent bits (no log2); inf where
    inf or NaN."""
    bits = s.view(torch.int32).clamp(max=FLOAT32_INF_BITS)
    return binades((bits + 0x7FFFFF).view(torch.float32))


def e8m0_value(byte: Tensor) -> Tensor:
    """uint8 E8M0 exponents -> float32 2^(byte - 127), NaN for 255. Byte 0 is the subnormal 2^-127."""
    return byte.view(torch.float8_e8m0fnu).to(torch.float32)


def e8m0_byte(power: Tensor) -> Tensor:
    """Float32 powers of two from 2^-127 on -> uint8 E8M0 exponents; inf gives 255."""
    return (power.view(torch.int32) >> constant(23, power, torch.int32)).to(torch.uint8)
