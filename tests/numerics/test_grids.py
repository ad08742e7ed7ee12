"""Grids found from values: every format of ours, grids of others, ordinary weights that have none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.numerics.effective_bits import ELEMENT_BITS
from harness.numerics.formats import FORMATS, format_named
from harness.numerics.grids import FEW, bits_of, distinct_share, grid_of
from harness.numerics.quantize import fake_quantize

GRIDS = [name for name, fmt in FORMATS.items() if fmt.tile is not None and fmt.rule not in ("kv", "ct_token")]


def normal(rows: int = 48, columns: int = 256, *seed: str) -> Tensor:
    """Weights as trained ones are."""
    return 0.02 * torch.randn(rows, columns, generator=generator("cpu", "grids", *seed))


@pytest.mark.parametrize("name", GRIDS)
def test_values_of_a_format_are_found_and_have_no_more_bits_than_it(name: str) -> None:
    fmt = format_named(name)
    found = grid_of(fake_quantize(normal(48, 256, name), fmt), 16)
    assert found is not None
    assert found == "few values" or bits_of(format_named(found)) <= bits_of(fmt)
    if bits_of(fmt) >= 8:
        assert found != "few values"  # too many levels: the format itself must be recognised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 256), (64, 64), (7, 96), (256, 1024)])
def test_ordinary_weights_lie_on_none(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = normal(*shape).to(dtype)
    assert grid_of(w, 16) is None
    if dtype == torch.float32:
        assert distinct_share(w.float()) == 1.0
    else:
        assert distinct_share(w.float()) > 0.95


def test_only_coarser_grids_than_planned_count() -> None:
    int4 = fake_quantize(normal(), format_named("int4_g32"))
    int8 = fake_quantize(normal(), format_named("int8_channel"))
    assert grid_of(int4, 4) is None and grid_of(int4, 8) is not None and grid_of(int4, 16) is not None
    assert grid_of(int8, 8) is None and grid_of(int8, 16) is not None
    assert (bits_of(None), bits_of(format_named("int4_g32")), bits_of(format_named("bf16"))) == (16, 4, 16)
    assert set(ELEMENT_BITS) >= {fmt.element for fmt in FORMATS.values()}


@pytest.mark.parametrize("levels", [3, 8, 16])
def test_a_grid_of_others_shows_by_few_distinct_values(levels: int) -> None:
    """A codebook with odd scales, which none of our formats has."""
    rng = generator("cpu", "codebook", levels)
    codebook = torch.randn(levels, generator=rng)
    codes = torch.randint(levels, (48, 256), generator=rng)
    scales = 0.01 * (1 + torch.rand(48, 8, generator=rng)).repeat_interleave(32, 1)
    w = codebook[codes] * scales
    assert grid_of(w, 16) == "few values" and distinct_share(w) < FEW
    assert grid_of(w, 4) is None


def test_distinct_shares_by_hand() -> None:
    run = torch.arange(1.0, 33.0)[None]
    assert distinct_share(run) == 1.0
    halves = torch.cat([run[:, :16], run[:, :16]], 1)
    assert distinct_share(halves) == 0.5
    zeros = torch.cat([run[:, :8], torch.zeros(1, 24)], 1)
    assert distinct_share(zeros) == 1.0  # zeros do not count: pruned weights are no grid
    assert distinct_share(torch.full((2, 64), 0.3)) == pytest.approx(1 / 32)
    assert distinct_share(run[:, :31]) == 1.0  # no whole run


def test_zeros_and_narrow_tensors_have_no_grid() -> None:
    assert grid_of(torch.zeros(8, 64), 16) is None
    assert grid_of(normal(8, 20), 16) is None
    pruned = normal() * (torch.rand(48, 256, generator=generator("cpu", "pruned")) < 0.3)
    assert grid_of(pruned, 16) is None
