from __future__ import annotations

import pytest
import torch

from harness.numerics import tiles

TILES = [(0, 0), (1, 0), (1, 4), (1, 16), (1, 500), (3, 5), (128, 128)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [(7, 33), (6, 20), (2, 3, 16), (1, 1)])
def test_join_undoes_split(tile: tuple[int, int], shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    assert torch.equal(tiles.join(tiles.split(x, tile), tile, x.shape), x)


def test_split_is_a_view_where_sizes_divide() -> None:
    x = torch.randn(6, 32)
    for tile in ((0, 0), (1, 0), (1, 16), (3, 8), (6, 32)):
        assert tiles.split(x, tile).data_ptr() == x.data_ptr(), tile


@pytest.mark.parametrize("tile", TILES)
def test_extremes_of_every_tile_by_loops(tile: tuple[int, int]) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    rows, columns = tile[0] or 7, tile[1] or 33
    view = tiles.split(x, tile)
    stored = tiles.store(tiles.amax(view, tile), tile)
    low, high = (tiles.store(side, tile) for side in tiles.extremes(view, tile))
    parts = [[x[i : i + rows, j : j + columns] for j in range(0, 33, columns)] for i in range(0, 7, rows)]
    assert stored.flatten().tolist() == [part.abs().max().item() for row in parts for part in row]
    assert low.flatten().tolist() == [part.min().item() for row in parts for part in row]
    assert high.flatten().tolist() == [part.max().item() for row in parts for part in row]
    assert torch.equal(tiles.store(tiles.spread(stored, tile, x.shape), tile), stored)


def test_spread_multiplies_each_tile_by_its_scale() -> None:
    x = torch.ones(4, 6)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = tiles.join(tiles.split(x, (3, 4)) * tiles.spread(scale, (3, 4), x.shape), (3, 4), x.shape)
    assert out[0].tolist() == [1, 1, 1, 1, 2, 2]
    assert out[3].tolist() == [3, 3, 3, 3, 4, 4]


def test_spread_refuses_another_number_of_scales() -> None:
    with pytest.raises(ValueError, match=r"scale has shape \(3,\); tile \(1, 4\) of \(2, 8\) needs \(2, 2\)"):
        tiles.spread(torch.ones(3), (1, 4), (2, 8))
