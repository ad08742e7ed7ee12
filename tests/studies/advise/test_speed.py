"""Speeds of a step against the capacity plan, with a range from its own errors, and every reason for none."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from harness.studies.advise.question import FORMATS
from harness.studies.advise.speed import placement, speed
from harness.studies.capacity.place import Work, place
from harness.studies.capacity.seconds import Links, StepTime, step
from tests.studies.advise.made import evidence, question


def planned(precision: str, gpus: int) -> StepTime:
    work = Work(size="7b", arm=precision, length=1024, batch=512)
    found = step(evidence().found, work, place(work, gpus), Links())
    assert found is not None
    return found


@pytest.mark.parametrize(("gpus", "kind"), [(1, "estimated"), (8, "assumed")])
def test_a_speed_is_the_plans_and_its_range_that_of_its_errors(gpus: int, kind: str) -> None:
    base, own = planned("bf16", gpus), planned("fp8_block", gpus)
    found = speed(evidence(), question(gpus=gpus), "fp8_block")
    assert found.kind == kind and found.value == pytest.approx(base.total / own.total)
    errors = {
        "generation": [row.measured / row.predicted for row in evidence().rows if row.what == "generation"],
        "rest": [row.measured / row.predicted for row in evidence().rows
                 if row.what in ("update, time", "verl, score", "verl, update") and row.where.startswith("7b,")],
    }  # fmt: skip
    assert len(errors["generation"]) > 4 and len(errors["rest"]) > 2
    ratios = list[float]()
    for a, b, f in itertools.product([1, *errors["generation"]], [1, *errors["generation"]], [1, *errors["rest"]]):
        slow, fast = (
            x * cost.seconds["generate"] + f * sum(s for name, s in cost.seconds.items() if name != "generate")
            for x, cost in ((a, base), (b, own))
        )
        ratios.append(slow / fast)
    assert (found.low, found.high) == pytest.approx((min(ratios), max(ratios)))
    assert 1 < found.low < found.value < found.high < 1.3
    assert f"a step of {base.total:.0f} s with BF16 rollouts, {own.total:.0f} s with these" in found.words


def test_bf16_is_as_fast_as_itself() -> None:
    found = speed(evidence(), question(), "bf16")
    assert found.value == 1 and found.low < 1 < found.high


@pytest.mark.parametrize(
    ("values", "precision", "expected"),
    [
        ({"gpu": "h100"}, "int8", "no rate was measured on h100; --gpu h200 answers for that one"),
        ({"size": "3m", "length": 250}, "int8", "no rate was measured at 3m"),
        ({}, "mxfp8", "no rate was measured with mxfp8"),
        ({"size": "3b"}, "fp8_block", "fp8_block: 3b was not timed with fp8_block at this batch and length"),
        ({"size": "32b"}, "int8", "bf16: the update needs "),
        ({"size": "0.5b"}, "int8", "rates of steps that waited for the host, not for the GPU; of them the plan makes "),
    ],
)
def test_no_speed_has_its_reason(values: dict[str, Any], precision: str, expected: str) -> None:
    found = speed(evidence(), question(**values), precision)
    assert found.kind == "not known" and found.words.startswith(expected) and math.isnan(found.value)


def test_no_speed_is_of_an_engine_that_the_trainer_refuses() -> None:
    """Two GPUs would hold 32B's engine, whose FP8 cache they cannot share. On eight each has one of its own."""
    said = "launch.tensor_parallel=2: the scales of an FP8 cache are those of all heads; valid with it: 1; "
    at = placement(question(size="32b", gpus=4), "fp8_block+kv8")
    assert at is not None and at.ways == 2 and at.reason.startswith(said)
    plain = placement(question(size="32b", gpus=4), "fp8_block")
    assert plain is not None and plain.ways == 2 and plain.reason.startswith("the update needs ")
    own = placement(question(size="32b", gpus=8), "fp8_block+kv8")
    assert own is not None and (own.ways, own.reason) == (1, "")


def test_conditions_are_those_of_the_placement() -> None:
    found = speed(evidence(), question(), "fp8_block")
    assert "each engine samples its answers in 2 groups, as many as its cache holds" in found.conditions
    assert "layers are checkpointed" in found.conditions
    groups = {name: [line for line in speed(evidence(), question(size="32b", gpus=16, length=8192), name).conditions
                     if "groups" in line] for name in ("int8", "nvfp4")}  # fmt: skip
    assert len(groups["int8"]) == 1 and "in 2 groups" in groups["int8"][0] and not groups["nvfp4"]
    assert placement(question(size="3m"), "int8") is None and placement(question(), "mxfp8") is None
    at = placement(question(gpus=8), FORMATS[0])
    assert at is not None and (at.gpus, at.ways) == (8, 1)
