"""Views of a tensor by the tiles that share a scale.

A tile is rows x columns, 0 for the whole axis (`Format.tile`). A tile larger than the axis is cut to it. Ragged last
tiles are filled by repeating the last row or column, which changes neither their largest nor their smallest value.

    tile      view of [..., N, K]            stored scale
    (0, 0)    as it is                       []
    (1, 0)    as it is                       [..., N, 1]
    (1, C)    [..., N, K/C, C]               [..., N, K/C]
    (R, C)    [..., N/R, R, K/C, C]          [..., N/R, K/C]
"""

from __future__ import annotations

import torch
from torch import Tensor

Tile = tuple[int, int]
_NARROW = 16


def split(x: Tensor, tile: Tile) -> Tensor:
    """`x` [..., N, K] by tiles; a view where the sizes divide."""
    rows, columns = tile
    if columns == 0:
        assert rows in (0, 1), f"unsupported tile {tile}"
        return x
    columns = min(columns, x.shape[-1])
    x = _fill(x, -1, columns)
    if rows == 1:
        return x.reshape(*x.shape[:-1], x.shape[-1] // columns, columns)
    rows = min(rows, x.shape[-2])
    x = _fill(x, -2, rows)
    return x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)


def join(view: Tensor, tile: Tile, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `split`: the tensor of `shape` without the filling."""
    if view.shape == shape:
        return view
    if tile[1] == 0:
        return view.reshape(shape)
    if tile[0] == 1:
        x = view.flatten(-2)
    else:
        x = view.reshape(*view.shape[:-4], view.shape[-4] * view.shape[-3], view.shape[-2] * view.shape[-1])
        x = x[..., : shape[-2], :] if x.shape[-2] != shape[-2] else x
    return x[..., : shape[-1]].contiguous() if x.shape[-1] != shape[-1] else x.contiguous()


def amax(view: Tensor, tile: Tile) -> Tensor:
    """Largest magnitude of every tile of a `split` view, broadcastable against it."""
    if tile == (0, 0):
        low, high = torch.aminmax(view)
        return torch.maximum(low.neg(), high)
    magnitude = view.abs()
    if tile[0] == 1 and view.shape[-1] == _NARROW:
        # torch reduces a last axis of fewer than 32 elements one by one on a CPU.
        magnitude = torch.maximum(magnitude[..., : _NARROW // 2], magnitude[..., _NARROW // 2 :])
    return magnitude.amax(_dims(tile), keepdim=True)


def extremes(view: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """(smallest, largest) value of every tile of a `split` view, broadcastable against it."""
    if tile == (0, 0):
        return view.amin(), view.amax()
    dims = _dims(tile)
    return view.amin(dims, keepdim=True), view.amax(dims, keepdim=True)


def store(scale: Tensor, tile: Tile) -> Tensor:
    """A scale that broadcasts against the view -> its stored shape."""
    if tile[1] == 0:
        return scale
    return scale.squeeze(-1) if tile[0] == 1 else scale.squeeze(-1).squeeze(-2)


def spread(scale: Tensor, tile: Tile, shape: tuple[int, ...]) -> Tensor:
    """A stored scale -> one that broadcasts against the view of a tensor of `shape`.

    Raises ValueError where the number of scales does not fit. Lost trailing dimensions of size 1 are put back.
    """
    want = stored_shape(tile, shape)
    if scale.shape != want:
        if scale.numel() != torch.Size(want).numel():
            raise ValueError(f"scale has shape {tuple(scale.shape)}; tile {tile} of {tuple(shape)} needs {want}")
        scale = scale.reshape(want)
    if tile[1] == 0:
        return scale
    return scale.unsqueeze(-1) if tile[0] == 1 else scale.unsqueeze(-2).unsqueeze(-1)


def stored_shape(tile: Tile, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the stored scales of a tensor of `shape`, which has at least one element."""
    rows, columns = tile
    if columns == 0:
        return () if rows == 0 else (*shape[:-1], 1)
    num_columns = -(-shape[-1] // min(columns, shape[-1]))
    if rows == 1:
        return (*shape[:-1], num_columns)
    return (*shape[:-2], -(-shape[-2] // min(rows, shape[-2])), num_columns)


def _dims(tile: Tile) -> tuple[int, ...]:
    return (-1,) if tile[0] == 1 else (-3, -1)


def _fill(x: Tensor, dim: int, size: int) -> Tensor:
    length = x.shape[dim]
    if length % size == 0:
        return x
    full = -(-length // size) * size
    return x.index_select(dim, torch.arange(full, device=x.device).clamp_(max=length - 1))
