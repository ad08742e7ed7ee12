"""Slabs: the parts of a rollout engine's weights that are quantized in one call.

A slab covers consecutive layers and, within a fused matrix, neighbouring tensors of one format, as far as that changes
nothing: no scale may reach from one tensor into another. One exception is meant: formats with a tensor-level scale
share it within a fused matrix, as engines demand (`harness.api.LINEAR`); there a slab is one fused matrix of one layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from harness.api import TensorRecord
from harness.engines.weight_stream import check_one_scale
from harness.numerics.formats import Format
from harness.numerics.quantize import Quantized, dequantize, has_tensor_scale, quantize


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Tensors quantized in one call, and where their values live."""

    names: tuple[tuple[str, ...], ...]
    """Names in the passport, [layer][part]."""
    sources: tuple[str, ...]
    """Names in the weight stream, layer by layer: the head of a tied model comes from the embedding."""
    rows: tuple[int, ...]
    """Rows of each part."""
    fmt: Format
    live: Tensor
    """View of the memory that the forward pass reads: [layers, sum of rows, ...], or [sum of rows, ...]."""
    is_stacked: bool
    """True where `live` has the layer axis."""


def cut(
    stack: Tensor, names: Sequence[Sequence[str]], rows: Sequence[int], formats: Mapping[str, Format]
) -> Iterator[Slab]:
    """The slabs of a stack [layers, sum of rows, ...] that holds tensors `names[layer][part]` of `rows[part]` rows."""
    ends = list(accumulate(rows))
    plans = [tuple(_segments([formats[name] for name in layer])) for layer in names]
    for segments, run in groupby(range(len(names)), key=plans.__getitem__):
        layers = list(run)
        for first, last, fmt in segments:
            live = stack[:, ends[first] - rows[first] : ends[last]]
            share = _is_stackable(fmt, live[0].numel())
            for chosen in [layers] if share else [[layer] for layer in layers]:
                inside = tuple(tuple(names[layer][first : last + 1]) for layer in chosen)
                yield Slab(
                    names=inside, sources=tuple(name for layer in inside for name in layer), fmt=fmt,
                    rows=tuple(rows[first : last + 1]),
                    live=live[chosen[0] : chosen[-1] + 1] if share else live[chosen[0]], is_stacked=share,
                )  # fmt: skip


def _segments(formats: list[Format]) -> Iterator[tuple[int, int, Format]]:
    """(first part, last part, format) of neighbouring parts that are quantized together."""
    for fmt, run in groupby(range(len(formats)), key=formats.__getitem__):
        parts = list(run)
        is_by_row = fmt.tile is None or (fmt.tile[0] in (0, 1) and fmt.element != "nf4")
        for chosen in [parts] if is_by_row else [[part] for part in parts]:
            yield chosen[0], chosen[-1], fmt


def _is_stackable(fmt: Format, numel: int) -> bool:
    """True where quantizing a stack of matrices equals quantizing each."""
    if fmt.element == "nf4":  # blocks of 64 of the flattened stack
        return not fmt.double_quant and numel % 64 == 0
    return fmt.tile is None or not (fmt.tile == (0, 0) or fmt.scale_dtype == "e4m3")


def gather(tensors: Mapping[str, Tensor], slab: Slab, dtype: torch.dtype) -> Tensor:
    """The slab's tensors laid out as `live`, in `dtype`; always new memory, for the stream's belongs to a trainer that
    goes on updating it."""
    return torch.cat([tensors[name] for name in slab.sources]).to(slab.live.device, dtype).view(slab.live.shape)


def fill(slab: Slab, tensors: Mapping[str, Tensor]) -> None:
    """Write a slab of a plain cast (a format without tiles) tensor by tensor: no copy of the slab is made."""
    layers, sources = slab.live if slab.is_stacked else slab.live[None], iter(slab.sources)
    for layer in layers:
        for part in layer.split(slab.rows):
            part.copy_(dequantize(quantize(tensors[next(sources)].to(part.device, torch.float32), slab.fmt)))


def given_scales(given: Mapping[str, Tensor], slab: Slab) -> Tensor | None:
    """The stream's scales (or zero points) of a slab, laid out as `quantize` takes them; None where it has none.

    Raises ValueError where only some tensors have one, or where a shared tensor-level scale is not the same for all.
    """
    names = [name for layer in slab.names for name in layer]
    some = [given[name].to(slab.live.device) for name in names if name in given]
    if not some:
        return None
    if len(some) < len(names):
        lacking = next(name for name in names if name not in given)
        raise ValueError(f"{lacking} comes without a scale, other layers or parts with one")
    if has_tensor_scale(slab.fmt) or some[0].ndim == 0:
        check_one_scale(names, some)
        return some[0]
    joined = torch.cat(some)
    return joined.unflatten(0, (len(slab.names), -1)) if slab.is_stacked else joined


def records(slab: Slab, q: Quantized) -> list[TensorRecord]:
    """One passport line per tensor: what is stored for it, and the CRC-32 of its codes and scales."""
    stored = [_as_bytes(part) for part in (q.codes, q.scale, q.zero_point, q.global_scale) if part is not None]
    dtype, found = str(q.codes.dtype).removeprefix("torch."), list[TensorRecord]()
    ends = list(accumulate(slab.rows))
    for i, layer in enumerate(slab.names):
        for name, rows, end in zip(layer, slab.rows, ends, strict=True):
            parts = [_share(array, slab, i, slice(end - rows, end)) for array in stored]
            crc = 0
            for part in parts:
                crc = zlib.crc32(part.data.cast("B"), crc)
            shape = None if q.scale is None else parts[1].shape[:-1]
            record = TensorRecord(name=name, format=slab.fmt.name, dtype=dtype, scale_shape=shape, hash=f"{crc:08x}")
            found.append(record)
    return found


def _as_bytes(x: Tensor) -> np.ndarray:
    """A tensor of any dtype as uint8 with one axis more, that of an element's bytes."""
    return x.cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def _share(stored: np.ndarray, slab: Slab, layer: int, rows: slice) -> np.ndarray:
    """One tensor's share of a slab's codes, scales or zero points (as bytes)."""
    if stored.ndim == 1:
        return stored
    if slab.fmt.element == "nf4" and stored.ndim == 2:  # flat scales, one part
        return stored.reshape(len(slab.names), -1, stored.shape[-1])[layer] if slab.is_stacked else stored
    stored = stored[layer] if slab.is_stacked else stored
    return stored[rows] if len(slab.rows) > 1 else stored
