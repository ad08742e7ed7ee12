"""Recipes in order, and by name."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from harness.studies.advise.question import FORMATS, Mismatch
from harness.studies.advise.recipes import advise, named
from tests.studies.advise.made import SMALL, curves, evidence, question


def test_what_is_answered_comes_first_and_the_control_among_it() -> None:
    found = advise(evidence(), curves(), question(0.01, **SMALL))
    assert {(r.precision, r.correction) for r in found.answered} == {
        ("bf16", "none"), *((name, how) for name in FORMATS for how in ("none", "TIS"))
    }  # fmt: skip
    assert not found.open and sum(r.is_control for r in found.answered) == 1
    changes = [r.accuracy.change for r in found.answered]
    assert changes == sorted(changes, reverse=True), "no speed is known, so the smaller loss is first"


def test_without_a_mismatch_bf16_alone_is_answered() -> None:
    found = advise(evidence(), curves(), question(gpus=8))
    assert [r.name for r in found.answered] == ["bf16"] and len(found.open) == 2 * len(FORMATS)
    assert found.answered[0].accuracy.change == 0
    speeds = [r.speed.value for r in found.open]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) == len(FORMATS)


def test_equal_speeds_go_by_loss_and_unknown_ones_come_last() -> None:
    asked = question(2e-4, gpus=8)
    asked.mismatch["mxfp8"] = Mismatch(k3=1e-4, source="made")  # pyright: ignore[reportIndexIssue] - a plain dict here
    found = advise(evidence(), curves(), asked).open
    assert {r.precision for r in found[-2:]} == {"mxfp8"} and math.isnan(found[-1].speed.value)
    for one, other in pairwise(found[:-2]):
        assert one.speed.value > other.speed.value or (
            one.precision == other.precision and one.accuracy.change >= other.accuracy.change
        )
    assert [r.name for r in found[:2]] == [f"{found[0].precision} with TIS", found[0].precision]


def test_a_recipe_by_its_name() -> None:
    found = advise(evidence(), curves(), question(gpus=8))
    assert (named(found, "int8").correction, named(found, "int8:TIS").correction) == ("none", "TIS")
    assert named(found, "bf16").is_control
    with pytest.raises(ValueError, match=r"--config int8:tis: unknown; nearest: int8, int8:TIS"):
        named(found, "int8:tis")
