"""Checkpoint layouts of codes: how 2-, 3-, 4- and 8-bit codes lie in int32 words and bytes. No arithmetic on values.

Integers as compressed-tensors' "pack-quantized" (code + 2^(bits-1), lowest bits first along the last axis), E2M1 with
the even element in the low nibble. Left out: NF4, which no engine loads packed, and kernel layouts (swizzles, Marlin),
which engines make themselves after loading.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from harness.numerics.quantize import Quantized
from harness.numerics.rounding import INT_BITS


def pack_int32(codes: Tensor, num_bits: int, *, dim: Literal[0, 1] = 1) -> Tensor:
    """Signed codes int8 [N, K] -> int32 words along `dim`: [N, ceil(K num_bits / 32)] or [ceil(N num_bits / 32), K].

    Dense: where the bits do not divide 32, a code may straddle two words. The axis is filled up with zero bits.
    Layout of compressed-tensors 0.20 compressors/pack_quantized/helpers.py.
    Raises ValueError for a bit width outside 1..8 or a code outside its range.
    """
    if not 1 <= num_bits <= 8:
        raise ValueError(f"num_bits is {num_bits}; it must lie in 1..8")
    half = 2 ** (num_bits - 1)
    if bool(((codes < -half) | (codes > half - 1)).any()):
        raise ValueError(f"codes leave the range of {num_bits} bits: {int(codes.min())}..{int(codes.max())}")
    unsigned = (codes.T if dim == 0 else codes).to(torch.int32) + half
    rows, length = unsigned.shape
    groups = torch.nn.functional.pad(unsigned, (0, -length % 32)).view(rows, -1, 32)
    start = torch.arange(32, dtype=torch.int32, device=codes.device) * num_bits
    word, offset = start // 32, start % 32
    words = torch.zeros(rows, groups.shape[1], num_bits, dtype=torch.int32, device=codes.device)
    words.index_add_(2, word, groups << offset)  # no two codes have a bit in common
    if 32 % num_bits:
        over = (offset + num_bits > 32).nonzero().flatten()
        words.index_add_(2, word[over] + 1, groups[..., over] >> (32 - offset[over]))
    packed = words.view(rows, -1)[:, : -(-length * num_bits // 32)]
    return (packed.T if dim == 0 else packed).contiguous()


def pack_fp4(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., K] -> uint8 [..., K/2], the even element in the low nibble. ValueError for odd K."""
    if codes.shape[-1] % 2:
        raise ValueError(f"the last axis has {codes.shape[-1]} codes; two per byte need an even number")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def pack(q: Quantized) -> dict[str, Tensor]:
    """A quantized weight [N, K] as checkpoint tensors by name after the module's: `weight_packed`, `weight_scale`, ...

    compressed-tensors' names for integers in groups, NVFP4 and MXFP4; ModelOpt's for NVFP4 under "torchao"; `weight`
    and `weight_scale` (`weight_scale_inv`, a multiplier, for 128 x 128 tiles) where codes need no packing.
    Raises ValueError for NF4 and for macro-blocks.
    """
    fmt = q.fmt
    if fmt.element == "nf4":
        raise ValueError(f"format {fmt.name} has no checkpoint layout here; dequantize it")
    if fmt.scale_dtype == "e8m0_m8":
        raise ValueError(f"format {fmt.name} has no checkpoint layout; choose mxfp4")
    if q.scale is None:
        return {"weight": q.codes}
    if fmt.element == "e2m1" and q.global_scale is not None:
        level = q.global_scale.reshape(-1)
        if fmt.rule == "torchao":
            return {"weight": pack_fp4(q.codes), "weight_scale": q.scale, "weight_scale_2": level}
        return {"weight_packed": pack_fp4(q.codes), "weight_scale": q.scale, "weight_global_scale": level}
    if fmt.scale_dtype == "e8m0":
        codes = {"weight_packed": pack_fp4(q.codes)} if fmt.element == "e2m1" else {"weight": q.codes}
        return codes | {"weight_scale": q.scale.view(torch.uint8)}
    if fmt.element in INT_BITS and fmt.tile != (1, 0):
        return _pack_groups(q, INT_BITS[fmt.element])
    return {"weight": q.codes, "weight_scale_inv" if fmt.tile == (128, 128) else "weight_scale": q.scale}


def _pack_groups(q: Quantized, num_bits: int) -> dict[str, Tensor]:
    assert q.scale is not None
    half = 2 ** (num_bits - 1)
    tensors = {
        "weight_packed": pack_int32(_signed(q.codes, half), num_bits),
        "weight_scale": q.scale,
        "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
    }
    if q.zero_point is not None:
        tensors["weight_zero_point"] = pack_int32(_signed(q.zero_point, half), num_bits, dim=0)
    return tensors


def _signed(codes: Tensor, half: int) -> Tensor:
    """Unsigned codes (the "qat" rule) shifted to the signed range; code and zero point shift alike."""
    return codes if codes.dtype == torch.int8 else (codes.to(torch.int16) - half).to(torch.int8)
