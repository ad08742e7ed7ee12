"""Checkpoint layouts of codes: how 2-, 3-, 4- and 8-bit codes lie in int32 words and bytes. No arithmetic on values.

Integers as compressed-tensors' "pack-quantized" (code + 2^(bits-1), lowest bits first along the last axis), E2M1 with
the even element in the low nibble, NF4 with the even element in the high nibble. Left out: kernel layouts (swizzles,
Marlin), which engines make themselves after loading.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from harness.numerics.quantize import Quantized
from harness.numerics.rounding import INT_BITS


def pack_int32(codes: Tensor, num_bits: int, *, dim: Literal[0, 1] = 1) -> Tensor:
    """Signed codes int8 [N, K] -> int32 words along `dim`: [N, ceil(K / p)] or [ceil(N / p), K], p = 32 // num_bits.

    The axis is filled up with the stored value 0 (the code -2^(bits-1)), as compressed-tensors does.
    Raises ValueError for a bit width outside 1..8 or a code outside its range.
    """
    per_word = _per_word(num_bits)
    half = 2 ** (num_bits - 1)
    if bool(((codes < -half) | (codes > half - 1)).any()):
        raise ValueError(f"codes leave the range of {num_bits} bits: [{int(codes.min())}, {int(codes.max())}]")
    unsigned = codes.to(torch.int64) + half
    if dim == 0:
        unsigned = unsigned.T
    rows, length = unsigned.shape
    words = -(-length // per_word)
    full = torch.nn.functional.pad(unsigned, (0, words * per_word - length)).view(rows, words, per_word)
    shifts = torch.arange(per_word, device=codes.device) * num_bits
    packed = (full << shifts).sum(-1)
    # Sums reach 2^32 - 1; as int32 the upper half wraps to negative words.
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.T.contiguous() if dim == 0 else packed


def unpack_int32(packed: Tensor, num_bits: int, shape: tuple[int, int], *, dim: Literal[0, 1] = 1) -> Tensor:
    """What `pack_int32` returns -> the codes, int8 of `shape` [N, K]."""
    per_word = _per_word(num_bits)
    words = (packed.T if dim == 0 else packed).to(torch.int64)
    shifts = torch.arange(per_word, device=packed.device) * num_bits
    unsigned = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
    length = shape[0] if dim == 0 else shape[1]
    codes = (unsigned.flatten(-2)[:, :length] - 2 ** (num_bits - 1)).to(torch.int8)
    return codes.T.contiguous() if dim == 0 else codes


def pack_fp4(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., K] (K even) -> uint8 [..., K/2], the even element in the low nibble."""
    even, odd = _pairs(codes)
    return even | (odd << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> E2M1 codes uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_nf4(codes: Tensor) -> Tensor:
    """NF4 codes uint8 of any shape -> flat uint8 [ceil(numel / 2)], the even element in the high nibble.

    An odd number is filled up with the code of 0, as bitsandbytes does.
    """
    flat = codes.reshape(-1)
    if flat.numel() % 2:
        flat = torch.nn.functional.pad(flat, (0, 1), value=7)
    even, odd = _pairs(flat)
    return (even << 4) | odd


def unpack_nf4(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat uint8 [ceil(numel / 2)] -> NF4 codes uint8 of `shape`."""
    codes = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 0xF), dim=-1).flatten()
    return codes[: torch.Size(shape).numel()].view(shape)


def pack(q: Quantized) -> dict[str, Tensor]:
    """A quantized weight [N, K] as checkpoint tensors by name after the module's: `weight_packed`, `weight_scale`, ...

    compressed-tensors' names for integers in groups, NVFP4 and MXFP4; ModelOpt's for NVFP4 under "torchao"; `weight` and
    `weight_scale` (`weight_scale_inv`, a multiplier, for 128 x 128 tiles) where codes need no packing.
    Raises ValueError for NF4, which no engine loads packed any more (`pack_nf4`).
    """
    fmt = q.fmt
    if fmt.element == "nf4":
        raise ValueError(f"format {fmt.name} has no checkpoint layout here; dequantize it")
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


def _per_word(num_bits: int) -> int:
    if not 1 <= num_bits <= 8:
        raise ValueError(f"num_bits is {num_bits}; it must lie in 1..8")
    return 32 // num_bits


def _pairs(codes: Tensor) -> tuple[Tensor, Tensor]:
    if codes.shape[-1] % 2:
        raise ValueError(f"the last axis has {codes.shape[-1]} codes; two per byte need an even number")
    return codes[..., ::2], codes[..., 1::2]
