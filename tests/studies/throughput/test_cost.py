"""The integral over contexts, ratios and crossings, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.studies.throughput.cost import (
    curve,
    decode_ratios,
    falls_below,
    generation_s,
    generation_tokens_per_s,
    integral,
)
from tests.studies.throughput import made

LINE = [(512.0, 4.512), (1024.0, 5.024), (4096.0, 8.096)]


@pytest.mark.parametrize(("start", "end"), [(64, 576), (600, 700), (512, 4096), (64, 4160), (1000, 1000)])
def test_the_integral_of_a_line_is_exact_inside_before_and_beyond(start: float, end: float) -> None:
    """The integral of 4 + x / 1000 is 4 (b - a) + (b^2 - a^2) / 2000."""
    expected = 4 * (end - start) + (end**2 - start**2) / 2000
    assert integral(LINE, start, end) == pytest.approx(expected, rel=1e-12)


def test_the_integral_is_the_trapezoid_rule_between_points() -> None:
    """A corner: 10 x 1, then a triangle of 10 x 4 / 2 on top of 10 x 1."""
    assert integral([(0, 1.0), (10, 1.0), (20, 5.0)], 0, 20) == pytest.approx(10 + 10 + 20)


def test_a_falling_start_is_held_flat_before_the_first_point() -> None:
    """Noise must not make short contexts dearer than the first measured one."""
    assert integral([(100, 5.0), (200, 4.0)], 0, 100) == pytest.approx(500)


@pytest.mark.parametrize("points", [[], [(512.0, 4.0)]])
def test_a_curve_needs_two_points(points: list[tuple[float, float]]) -> None:
    """One context says nothing about others."""
    assert integral(points, 64, 500) is None


def test_a_generation_beyond_the_measured_contexts_has_no_cost() -> None:
    """5 % beyond the last point is the limit: 4096 x 1.05 = 4300.8."""
    assert integral(LINE, 64, 4300) is not None
    assert integral(LINE, 64, 4301) is None


def test_a_generation_of_a_record(tmp_path: Path) -> None:
    """4096 tokens after 64 at batch 8: 4 ms x 4096 + (4160^2 - 64^2) / 2000 ms; 64 x 4096 was not measured."""
    sweep = made.sweep(tmp_path)
    record = made.records(sweep)["7b-bf16"]
    seconds = (4 * 4096 + (4160**2 - 64**2) / 2000) / 1e3
    assert generation_s(record, 8, 64, 4096) == pytest.approx(seconds)
    assert generation_tokens_per_s(record, 8, 64, 4096) == pytest.approx(8 * 4096 / seconds)
    assert [context for context, _ in curve(record, 64)] == [512.0, 1024.0]
    assert generation_s(record, 64, 64, 4096) is None


def test_ratios_need_both_sides(tmp_path: Path) -> None:
    """int4 at batch 8, context 1024: 5.024 ms over 2 + 1.024 + 0.8 ms."""
    found = made.records(made.sweep(tmp_path))
    ratios = dict(decode_ratios(found["7b-int4"], found["7b-bf16"], (1, 8, 64), 1024))
    assert ratios[8] == pytest.approx(5.024 / 3.824)
    assert dict(decode_ratios(found["7b-int4"], found["7b-bf16"], (1, 8, 64), 4096)).keys() == {1, 8}
    assert decode_ratios({}, found["7b-bf16"], (1, 8), 1024) == []


def test_the_crossing_is_linear_in_the_logarithm_of_the_batch() -> None:
    """1.2 at 16 and 0.8 at 64 meet 1 half way on the logarithmic axis: 32."""
    assert falls_below([(1, 1.5), (16, 1.2), (64, 0.8)]) == pytest.approx(32)
    assert falls_below([(16, 1.1), (64, 0.9), (256, 0.5)]) == pytest.approx(32)


def test_no_crossing_where_it_recovers_or_hardly_falls() -> None:
    """Noise of 3 % is not a crossing, nor is a dip that later batches undo; all below 1 is the first batch."""
    assert falls_below([(1, 1.2), (8, 0.99), (64, 0.98)]) is None
    assert falls_below([(1, 1.2), (8, 0.5), (64, 1.1)]) is None
    assert falls_below([]) is None
    assert falls_below([(8, 0.9), (64, 0.8)]) == 8
    at = falls_below([(1, 1.2), (8, 0.99), (64, 0.9)])
    assert at is not None
    assert math.log(at) == pytest.approx(math.log(8) * 0.2 / 0.21)
