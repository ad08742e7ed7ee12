"""Factors at a place of the map and over its neighbours, against the closed forms of the made records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.studies.throughput.factors import Factor, MapPoint, factor_at
from tests.studies.throughput import made


def place(**asked: Any) -> MapPoint:
    """int8 of the 7B at 512 tokens, where nothing else is asked for."""
    known: dict[str, Any] = {"size": "7b", "precision": "int8", "length": 512}
    return MapPoint(**known | asked)


def at(tmp_path: Path, **asked: Any) -> Factor | None:
    """The answer of the made records."""
    sweep = made.sweep(tmp_path)
    return factor_at(sweep, made.records(sweep), place(**asked))


def over(precision: str, batch: int, context: int) -> float:
    """BF16's step over another's."""
    return made.step_ms("bf16", batch, context) / made.step_ms(precision, batch, context)


def test_a_decode_factor_has_the_range_of_the_cells_next_to_it(tmp_path: Path) -> None:
    """int4 at 8 x 1024: its neighbours are all nine cells but 64 x 4096, which the cache does not hold."""
    found = at(tmp_path, precision="int4", batch=8, length=1024, measure="decode")
    assert found is not None
    assert found.value == pytest.approx(over("int4", 8, 1024))
    assert (found.low, found.high) == pytest.approx((over("int4", 64, 512), over("int4", 1, 512)))
    assert (found.cells, found.is_disturbed) == (8, False)
    assert found.by_batch == ((8, found.value),)
    corner = at(tmp_path, precision="int4", batch=1, length=512, measure="decode")
    assert corner is not None
    assert corner.cells == 4
    assert corner.low == pytest.approx(over("int4", 8, 1024))


def test_an_open_batch_is_answered_by_all(tmp_path: Path) -> None:
    """The geometric mean over batches, with the lengths next to it in the range."""
    found = at(tmp_path, precision="int4", length=4096, measure="decode")
    assert found is not None
    own = [over("int4", batch, 4096) for batch in (1, 8)]
    assert found.value == pytest.approx(math.sqrt(own[0] * own[1]))
    assert [batch for batch, _ in found.by_batch] == [1, 8]
    assert found.cells == 2 + 3
    assert found.low == pytest.approx(over("int4", 64, 1024))


def test_a_generation_is_compared_by_its_whole_cost(tmp_path: Path) -> None:
    """512 tokens after 64: the mean context is 320."""
    found = at(tmp_path, batch=8)
    assert found is not None
    assert found.value == pytest.approx((4 + 0.320) / (3.2 + 0.320))


def test_factors_of_sizes_lengths_and_other_precisions_are_divided(tmp_path: Path) -> None:
    """Sizes are equal in the made records; int4 over int8; int8's factor falls with the context."""
    size = at(tmp_path, batch=8, against_size="0.5b")
    assert size is not None and (size.value, size.low, size.high) == pytest.approx((1, 1, 1))
    other = at(tmp_path, batch=8, precision="int4", over="int8", measure="decode")
    assert other is not None
    assert other.value == pytest.approx(made.step_ms("int8", 8, 512) / made.step_ms("int4", 8, 512))
    length = at(tmp_path, batch=8, length=4096, against_length=512, measure="decode")
    assert length is not None
    assert length.value == pytest.approx(over("int8", 8, 4096) / over("int8", 8, 512))


def test_what_is_not_measured_has_no_factor(tmp_path: Path) -> None:
    """Beyond the cache, a format that failed, and one that was never started."""
    assert at(tmp_path, batch=64, length=4096) is None
    assert at(tmp_path, size="0.5b", precision="int4", batch=8) is None
    assert at(tmp_path, precision="fp16", batch=8) is None
    assert at(tmp_path, precision="int4", batch=8, against_size="0.5b") is None


def test_a_range_that_rests_on_a_disturbed_cell_says_so(tmp_path: Path) -> None:
    """BF16's 8 x 512 counts for its neighbours, and for every generation at batch 8; not for the far corner."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    records["7b-bf16"]["cells"]["8x512"]["step_ms_p90"] *= 2

    def is_disturbed(**asked: Any) -> bool:
        found = factor_at(sweep, records, place(**asked))
        assert found is not None
        return found.is_disturbed

    assert is_disturbed(batch=1, length=1024, measure="decode")
    assert not is_disturbed(batch=1, length=4096, measure="decode")
    assert is_disturbed(batch=1, length=4096)
    assert is_disturbed(batch=64, length=512)
