"""NF4 of QLoRA (2305.14314) as bitsandbytes stores it: blocks of 64 of the flattened tensor, 16 fixed levels.

Double quantization replaces the float32 absmax of every block by an index into an 8-bit "dynamic" table
(2110.02861), in blocks of 256 around their mean. Left out: bitsandbytes' own "fp4", which is not E2M1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 64
OUTER_BLOCK = 256
"""Blocks whose maxima share one float32 scale under double quantization."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BINS = 32
"""Equal bins over [-1, 1], each of which holds one decision point at most (the closest two are 0.08 apart)."""


def quantize_nf4(
    w: Tensor, is_double: bool, absmax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """float32 `w` of any shape -> (codes uint8 of its shape, scale, offset, outer scale).

    scale: absmax float32 [ceil(numel / 64)], or its uint8 indices where `is_double`, with offset [] and outer scale
    [ceil(blocks / 256)], float32. `absmax` given: frozen maxima. A zero block gives code 7. Raises ValueError for
    maxima of another number of blocks, and with `is_double`.
    """
    blocks = _by_blocks(w.reshape(-1), BLOCK)
    if absmax is None:
        absmax = blocks.abs().amax(-1)
    elif is_double or absmax.numel() != blocks.shape[0]:
        raise ValueError(f"scale has shape {tuple(absmax.shape)}; single-quantized NF4 needs ({blocks.shape[0]},)")
    else:
        absmax = absmax.to(torch.float32).reshape(-1)
    v = blocks.mul(1.0 / absmax.clamp(min=1e-38).unsqueeze(1)).clamp_(-1.0, 1.0)
    codes = _nearest(v).reshape(-1)[: w.numel()].reshape(w.shape)
    if not is_double:
        return codes, absmax, None, None
    offset = absmax.mean()
    inner = _by_blocks(absmax - offset, OUTER_BLOCK)
    outer = inner.abs().amax(-1)
    indices = nearest_dynamic(inner * (1.0 / outer.clamp(min=1e-38)).unsqueeze(1))
    return codes, indices.reshape(-1)[: absmax.numel()], offset, outer


def dequantize_nf4(codes: Tensor, scale: Tensor, offset: Tensor | None, outer: Tensor | None) -> Tensor:
    """Dequantize what `quantize_nf4` returns: float32 of the codes' shape."""
    absmax = scale
    if outer is not None:
        assert offset is not None
        table = dynamic_map(scale.device).index_select(0, scale.int())
        absmax = (_by_blocks(table, OUTER_BLOCK) * outer.unsqueeze(1)).reshape(-1)[: scale.numel()] + offset
    levels = _level_tables(codes.device)[0]
    values = _by_blocks(levels.index_select(0, codes.reshape(-1).int()), BLOCK) * absmax.unsqueeze(1)
    return values.reshape(-1)[: codes.numel()].reshape(codes.shape)


@lru_cache(maxsize=8)
def dynamic_map(device: torch.device) -> Tensor:
    """The 256 levels of the signed 8-bit dynamic data type, float32 ascending: seven decades of linear fractions."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        fractions = (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        levels += [sign * f for f in fractions for sign in (1.0, -1.0)]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _level_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(levels [16], first code of every bin [33], decision point in every bin [33], 2 where there is none)."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    middles = (levels[:-1] + levels[1:]) / 2
    edges = torch.arange(_BINS + 1, dtype=torch.float32) * (2 / _BINS) - 1
    first = torch.bucketize(edges, middles)
    following = torch.cat((middles, torch.tensor([2.0])))[first]
    inside = torch.where(following < edges + 2 / _BINS, following, 2.0)
    return levels.to(device), first.to(torch.uint8).to(device), inside.to(device)


def _nearest(v: Tensor) -> Tensor:
    """Nearest level of `v` in [-1, 1], the lower one at a tie: uint8. Two look-ups and a comparison, no search."""
    _, first, inside = _level_tables(v.device)
    bins = v.reshape(-1).add(1.0).mul_(_BINS / 2).int()
    # NaN becomes an arbitrary integer; its block's absmax is NaN too, so the value stays NaN.
    bins.clamp_(0, _BINS)
    return first.index_select(0, bins).add_(v.reshape(-1) > inside.index_select(0, bins)).view(v.shape)


def nearest_dynamic(v: Tensor) -> Tensor:
    """Index uint8 of the level of `dynamic_map` nearest to `v` in [-1, 1], float32 of any shape.

    Exact, as bitsandbytes' CUDA kernel is; its CPU code first rounds `v` to 65536 equal steps.
    """
    levels = dynamic_map(v.device)
    return torch.bucketize(v, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)


def _by_blocks(flat: Tensor, size: int) -> Tensor:
    """[n] -> [ceil(n / size), size], filled up with its last value."""
    if flat.numel() % size:
        full = -(-flat.numel() // size) * size
        flat = flat.index_select(0, torch.arange(full, device=flat.device).clamp_(max=flat.numel() - 1))
    return flat.reshape(-1, size)
