"""Codes read back from the layouts of `harness.numerics.packing`: the opposite of each of its packers; and from
bitsandbytes' layout of NF4."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def unpack_int32(packed: Tensor, num_bits: int, shape: tuple[int, int], *, dim: Literal[0, 1] = 1) -> Tensor:
    """Unpack what `pack_int32` returns: the codes, int8 of `shape` [N, K]."""
    flat = packed.T if dim == 0 else packed
    rows, length = flat.shape[0], shape[dim]
    words = torch.nn.functional.pad(flat, (0, -flat.shape[1] % num_bits)).view(rows, -1, num_bits)
    groups = torch.empty(rows, words.shape[1], 32, dtype=torch.int32, device=packed.device)
    for i in range(32):
        word, offset = divmod(i * num_bits, 32)
        part = words[..., word] >> offset
        if offset + num_bits > 32:
            # The shift repeats the sign: keep the bits that came from this word.
            part = (part & (2 ** (32 - offset) - 1)) | (words[..., word + 1] << (32 - offset))
        groups[..., i] = part & (2**num_bits - 1)
    codes = (groups.view(rows, -1)[:, :length] - 2 ** (num_bits - 1)).to(torch.int8)
    return (codes.T if dim == 0 else codes).contiguous()


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> E2M1 codes uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def unpack_nf4(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat uint8 [ceil(numel / 2)], the even element in the high nibble -> NF4 codes uint8 of `shape`."""
    codes = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 0xF), dim=-1).flatten()
    return codes[: torch.Size(shape).numel()].view(shape)
