"""The grid of answers: every cell is that of the question asked alone, words once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.studies.advise.accuracy import CORRECTIONS, accuracy
from harness.studies.advise.answers import DEPLOY, DOSES, GPUS, LENGTHS, SIZES, TEXT, answers, write_answers
from harness.studies.advise.question import FORMATS, Mismatch, given_mismatch
from harness.studies.advise.report import speed_words
from harness.studies.advise.speed import speed
from tests.studies.advise.made import RESULTS, curves, evidence, question

ON_TEXT = {"int8": Mismatch(k3=1.234e-3, source="text"), "mxfp8": Mismatch(k3=0.5, source="text")}


@cache
def grid() -> dict[str, Any]:
    return answers(evidence(), {name: curves(name) for name in DEPLOY}, ON_TEXT)


@pytest.mark.parametrize("size", ["7b", "0.5b", "3m"])
@pytest.mark.parametrize("gpus", [1, 8])
def test_speeds_are_those_of_the_question(size: str, gpus: int) -> None:
    row = grid()["speeds"][f"{size} 4096 {gpus}"]
    for name, (value, cell, source) in zip(FORMATS, row, strict=True):
        found = speed(evidence(), question(size=size, length=4096, gpus=gpus), name)
        assert value == (pytest.approx(found.value, rel=1e-5) if found.value == found.value else None)
        assert (grid()["words"][cell], grid()["words"][source]) == (speed_words(found), found.words)


@pytest.mark.parametrize("deploy", list(DEPLOY))
@pytest.mark.parametrize("dose", ["not measured", TEXT, "1e-3"])
def test_accuracies_are_those_of_the_question(deploy: str, dose: str) -> None:
    mismatch = {"not measured": {}, TEXT: {"int8": Mismatch(k3=1.2e-3, source="text")}}.get(dose)
    asked = question(
        size="3m", length=250, deploy=deploy, mismatch=given_mismatch(dose) if mismatch is None else mismatch
    )
    row = grid()["accuracies"][f"3m 250 {deploy} {dose}"]
    pairs = [(name, how) for name in FORMATS for how in CORRECTIONS]
    for (name, how), (is_known, change, cell, source) in zip(pairs, row, strict=True):
        found = accuracy(curves(deploy), asked, name, how)
        assert is_known == (found.kind == "known") and (change is None) == (found.change != found.change)
        assert (grid()["words"][cell], grid()["words"][source]) == (found.shown, found.words)


def test_the_grid_is_whole_and_strict(tmp_path: Path) -> None:
    found = grid()
    assert set(found["speeds"]) == {f"{s} {n} {g}" for s in SIZES for n in LENGTHS for g in GPUS}
    assert set(found["accuracies"]) == {
        f"{s} {n} {d} {k}" for s in SIZES for n in LENGTHS for d in DEPLOY for k in DOSES
    }
    assert len(set(found["words"])) == len(found["words"]) and found["k3"][TEXT] == "int8=0.0012"
    path = write_answers(found, tmp_path)
    assert path.name == "advise.json" and json.loads(path.read_bytes()) == json.loads(json.dumps(found))


def test_the_committed_grid_has_this_shape() -> None:
    committed = json.loads((RESULTS / "tables" / "advise.json").read_bytes())
    found = json.loads(json.dumps(grid()))
    same = ("sizes", "lengths", "gpus", "deploy", "doses", "formats", "corrections", "control")
    assert {name: committed[name] for name in same} == {name: found[name] for name in same}
    assert set(committed["accuracies"]) == set(found["accuracies"])
    for key, row in found["speeds"].items():  # speeds rest on the committed rates in both
        assert [cell[0] for cell in committed["speeds"][key]] == [cell[0] for cell in row]
