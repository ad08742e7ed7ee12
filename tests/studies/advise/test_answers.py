"""The grid of answers: every cell is that of the question asked alone, words once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.studies.advise.accuracy import accuracy, control
from harness.studies.advise.answers import GPUS, LENGTHS, MISMATCHES, SIZES, answers, write_answers
from harness.studies.advise.question import DEPLOY, FORMATS, given_mismatch
from harness.studies.advise.report import speed_words
from harness.studies.advise.speed import speed
from tests.studies.advise.made import RESULTS, evidence, question, tables


@cache
def grid() -> dict[str, Any]:
    return answers(evidence(), tables())


@pytest.mark.parametrize("size", ["7b", "0.5b"])
@pytest.mark.parametrize("gpus", [1, 8])
def test_speeds_are_those_of_the_question(size: str, gpus: int) -> None:
    row = grid()["speeds"][f"{size} 4096 {gpus}"]
    for name, (value, cell, source) in zip(FORMATS, row, strict=True):
        found = speed(evidence(), question(size=size, length=4096, gpus=gpus), name)
        assert value == (pytest.approx(found.value, rel=1e-5) if found.value == found.value else None)
        assert (grid()["words"][cell], grid()["words"][source]) == (speed_words(found), found.words)


@pytest.mark.parametrize("deploy", list(DEPLOY))
@pytest.mark.parametrize("k3", ["not measured", "1e-3"])
def test_accuracies_are_those_of_the_question(deploy: str, k3: str) -> None:
    asked = question(deploy=deploy, mismatch={} if k3 == "not measured" else given_mismatch(k3))
    table, words = tables()[deploy], grid()["words"]
    *rows, last = grid()["accuracies"][f"{deploy} {k3}"]
    wanted = [accuracy(table, asked, name, how) for name, how in grid()["pairs"]]
    for (standing, cells, source), found in zip([*rows, last], [*wanted, control(table)], strict=True):
        assert (standing, [words[cell] for cell in cells]) == (found.standing, [*found.cells, found.k3])
        assert words[source] == found.words


def test_the_grid_is_whole_and_strict(tmp_path: Path) -> None:
    found = grid()
    assert set(found["speeds"]) == {f"{s} {n} {g}" for s in SIZES for n in LENGTHS for g in GPUS}
    assert set(found["accuracies"]) == {f"{d} {k}" for d in DEPLOY for k in MISMATCHES}
    assert len(set(found["words"])) == len(found["words"])
    path = write_answers(found, tmp_path)
    assert path.name == "advise.json" and json.loads(path.read_bytes()) == json.loads(json.dumps(found))


def test_the_committed_grid_has_this_shape() -> None:
    committed = json.loads((RESULTS / "tables" / "advise.json").read_bytes())
    found = json.loads(json.dumps(grid()))
    same = ("sizes", "lengths", "gpus", "deploy", "mismatches", "formats", "pairs", "none", "standings")
    assert {name: committed[name] for name in same} == {name: found[name] for name in same}
    assert set(committed["accuracies"]) == set(found["accuracies"])
    for key, row in found["speeds"].items():  # speeds rest on the committed rates in both
        assert [cell[0] for cell in committed["speeds"][key]] == [cell[0] for cell in row]
