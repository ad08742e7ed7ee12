"""Recipes in order, and by name."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from harness.studies.advise.accuracy import STANDINGS
from harness.studies.advise.question import FORMATS, Mismatch
from harness.studies.advise.recipes import advise, named
from tests.studies.advise.made import evidence, question, tables


def test_every_recipe_once_by_standing_then_by_speed() -> None:
    found = advise(evidence(), tables()["bf16"], question(gpus=8))
    assert sorted((r.precision, r.correction) for r in found.recipes) == sorted(
        [("bf16", "none"), ("int4", "IcePop"), *((name, how) for name in FORMATS for how in ("none", "TIS"))]
    )
    assert [r for name in STANDINGS for r in found.of(name)] == found.recipes and found.tokens == (240, 740)
    for name in STANDINGS:
        speeds = [1.0 if r.is_control else r.speed.value for r in found.of(name)]
        assert speeds == sorted(speeds, reverse=True)
    assert [(r.precision, r.correction) for r in found.of("held")][-1] == ("bf16", "none"), "each of them is faster"


def test_of_equal_speed_the_corrected_is_first_and_unknown_speeds_come_last() -> None:
    asked = question(gpus=8)
    asked.mismatch["mxfp8"] = Mismatch(k3=1e-4, source="made")  # pyright: ignore[reportIndexIssue] - a plain dict here
    found = advise(evidence(), tables()["bf16"], asked).of("undecided")
    assert {r.precision for r in found[-2:]} == {"mxfp8"} and math.isnan(found[-1].speed.value)
    assert all(one.speed.value >= other.speed.value for one, other in pairwise(found[:-2]))
    assert [r.name for r in found[:2]] == ["fp8_block+kv8 with TIS", "fp8_block+kv8"]


def test_a_recipe_by_its_name() -> None:
    found = advise(evidence(), tables()["bf16"], question(gpus=8))
    assert (named(found, "int8").correction, named(found, "int8:TIS").correction) == ("none", "TIS")
    assert named(found, "int4:IcePop").name == "int4 with IcePop" and named(found, "int4:none") is named(found, "int4")
    with pytest.raises(ValueError, match=r"^--config int8:IcePop: IcePop did not run in int8; it ran in int4$"):
        named(found, "int8:IcePop")
    assert named(found, "bf16").is_control
    with pytest.raises(ValueError, match=r"--config int8:tis: unknown; nearest: int8, int8:TIS"):
        named(found, "int8:tis")
