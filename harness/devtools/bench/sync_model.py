"""The weights of the sync benchmark: what a trainer holds and the fused buffers of an engine, by format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics.formats import Format
from harness.numerics.packing import pack
from harness.numerics.quantize import quantize


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2.5 decoder with an untied head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


SIZES = {
    "toy": Shape(layers=2, hidden=256, heads=2, kv_heads=1, head_dim=128, intermediate=384, vocab=512),
    "7b": Shape(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064),
}


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """One linear layer and its rows of the engine's fused matrix."""

    w: Tensor
    """[N, K] bf16 of the trainer."""
    out: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True)
class EngineBuffers:
    """The buffers of one format, and what is to be written into them."""

    fmt: Format
    groups: list[list[LayerRows]]
    """By fused matrix."""
    plain: list[tuple[Tensor, Tensor]]
    """(source, target), copied as they are."""
    amax: Tensor
    """float32, one per fused matrix, for formats with a scale of the whole matrix."""

    def parts(self) -> Iterator[LayerRows]:
        """Every linear layer."""
        return (part for group in self.groups for part in group)

    def num_bytes(self) -> int:
        """Bytes that a sync must read and write."""
        linear = sum(part.w.nbytes + part.out.nbytes + part.scale.nbytes for part in self.parts())
        return linear + sum(2 * source.nbytes for source, _ in self.plain)


def trainer_weights(shape: Shape, device: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """(the linear layers by fused matrix, everything else): random bf16."""
    g = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device, dtype=torch.bfloat16).mul_(0.02)

    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    fused = (((q, kv, kv), hidden), ((hidden,), q), ((shape.intermediate,) * 2, hidden),
             ((hidden,), shape.intermediate))  # fmt: skip
    groups = [[draw(n, k) for n in rows] for _ in range(shape.layers) for rows, k in fused]
    small = [draw(n) for _ in range(shape.layers) for n in (q, kv, kv, hidden, hidden)]
    return groups, [draw(shape.vocab, hidden), draw(shape.vocab, hidden), draw(hidden), *small]


def engine_for(groups: list[list[Tensor]], plain: list[Tensor], fmt: Format) -> EngineBuffers:
    """Empty fused buffers in the layouts that `packing.pack` gives."""
    fused: list[list[LayerRows]] = []
    for group in groups:
        # Shapes follow from those of a matrix with few rows; blocks are 128 rows tall, and so is every part.
        rows = [len(w) for w in group]
        codes, scale = packed(group[0][:128], fmt)
        tall = 128 // len(scale)
        out = torch.empty((sum(rows), *codes.shape[1:]), dtype=codes.dtype, device=codes.device)
        scales = torch.empty((sum(rows) // tall, *scale.shape[1:]), dtype=scale.dtype, device=codes.device)
        pieces = zip(group, out.split(rows), scales.split([n // tall for n in rows]), strict=True)
        fused.append([LayerRows(w=w, out=o, scale=s) for w, o, s in pieces])
    amax = torch.zeros(len(groups), device=plain[0].device)
    return EngineBuffers(fmt=fmt, groups=fused, plain=[(w, torch.empty_like(w)) for w in plain], amax=amax)


def packed(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The reference: (codes as an engine loads them, scales)."""
    found = pack(quantize(w, fmt))
    codes = next(found[name] for name in ("weight_packed", "weight") if name in found)
    return codes, next(found[name] for name in ("weight_scale", "weight_scale_inv") if name in found)
