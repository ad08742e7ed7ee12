"""The site's first form: in a browser it gives the answers of `lowbit advise`, row by row, and the command it names."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import parse
from harness.studies.advise.accuracy import Curves, curves_of
from harness.studies.advise.answers import DEPLOY, DOSES, TEXT, answers, write_answers
from harness.studies.advise.cases import text_mismatch
from harness.studies.advise.question import DEPLOYED, Question, given_mismatch
from harness.studies.advise.recipes import Recipe, advise
from harness.studies.advise.report import speed_words
from harness.studies.advise.speed import Evidence, read_evidence
from harness.studies.dose.points import read_points
from harness.viewers.site import write_site
from tests.source_tree import ROOT
from tests.viewers.browser import answer

PACKED = ("length", "main_h200", "wordmath_first")
QUESTIONS = [
    [size, length, gpus, dose, deploy]
    for size, length, gpus in (("3m", 250, 1), ("3m", 1024, 1), ("0.5b", 16384, 16), ("7b", 8192, 8), ("32b", 1024, 1))
    for dose in DOSES
    for deploy in DEPLOY
]
ASK = """
  return %s.map((asked) => {
    ["size", "length", "gpus", "dose", "deploy"].forEach((name, i) => { $("a-" + name).value = asked[i]; });
    $("question-form").dispatchEvent(new page.Event("change"));
    const rows = [], cells = (row) => [...row.children].map((cell) => cell.textContent);
    for (const row of $("advice-rows").tBodies[0].rows) {
      if (row.className === "part") rows.push([]);
      else if (row.className === "evidence") rows.at(-1).at(-1).push(cells(row)[0]);
      else rows.at(-1).push(cells(row));
    }
    return { rows, words: $("advice-words").textContent, command: $("advice-command").textContent };
  });"""


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return read_evidence(ROOT / "results")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packed sweeps of real runs."""
    folder = tmp_path_factory.mktemp("advice")
    (folder / "packed").mkdir()
    for name in PACKED:
        (folder / "packed" / f"{name}.zip").symlink_to(ROOT / "results" / "packed" / f"{name}.zip")
    return folder


@pytest.fixture(scope="module")
def curves(results: Path) -> dict[str, Curves]:
    points = read_points(results)
    return {name: curves_of(points, name) for name in DEPLOYED}


@pytest.fixture(scope="module")
def site(results: Path, evidence: Evidence, curves: dict[str, Curves]) -> Path:
    """A site of these sweeps with the grid of answers."""
    write_answers(answers(evidence, curves, text_mismatch(read_points(results))), results / "tables")
    write_site(results, ["length"])
    return results


@pytest.fixture(scope="module")
def shown(site: Path) -> list[dict[str, Any]]:
    """The page's answers to every question."""
    return answer(site, ASK % json.dumps(QUESTIONS))


def cells(recipe: Recipe) -> list[str]:
    """A row of the page, as `lowbit advise` has it."""
    if recipe.is_control:
        return ["bf16", "none", "1, the control", "0, the control"]
    return [recipe.precision, recipe.correction, speed_words(recipe.speed), recipe.accuracy.shown]


def test_every_answer_is_that_of_the_command_it_names(
    shown: list[dict[str, Any]], evidence: Evidence, curves: dict[str, Curves]
) -> None:
    kinds: set[str] = set()
    for (size, length, gpus, dose, deploy), page in zip(QUESTIONS, shown, strict=True):
        program, *words = shlex.split(page["command"])
        a = parse(words)
        assert (program, a.size, a.length, a.gpus, a.deploy, a.batch) == ("lowbit", size, length, gpus, deploy, 512)
        assert dose in (a.k3, TEXT, DOSES[0]) and (a.k3 is None) == (dose == DOSES[0])
        question = Question(
            size=a.size, length=a.length, gpus=a.gpus, deploy=a.deploy, mismatch=given_mismatch(a.k3) if a.k3 else {}
        )
        wanted = advise(evidence, curves[deploy], question)
        kinds |= {recipe.accuracy.kind for recipe in [*wanted.answered, *wanted.open]}
        for rows, recipes in zip(page["rows"], (wanted.answered, wanted.open), strict=True):
            assert [row[:4] for row in rows] == [cells(recipe) for recipe in recipes]
            for row, recipe in zip(rows, recipes, strict=True):
                if not recipe.is_control:
                    assert row[4].startswith(f"Step: {recipe.speed.words}. Accuracy: ")
    assert kinds == {"known", "dose only", "not known"}


def is_faster(step: str) -> bool:
    return step[0].isdigit() and float(step.split()[0].rstrip(",")) > 1


def test_the_sentence_names_the_fastest_whose_risk_is_answered(shown: list[dict[str, Any]]) -> None:
    counts: Counter[tuple[bool, bool]] = Counter()
    for page in shown:
        faster, may = ([row for row in rows if is_faster(row[2])] for rows in page["rows"])
        if faster:
            name = faster[0][0] + (f" with {faster[0][1]}" if faster[0][1] != "none" else "")
            assert page["words"].startswith(f"{name}: the fastest whose risk is answered, a step {faster[0][2]}; ")
        else:
            assert page["words"].startswith("bf16: no faster format has a change of accuracy that is known here.")
            rest = page["words"].partition(" known here.")[2]
            named = (
                f" The fastest that may be: {may[0][0]}, a step {may[0][2]}; its accuracy is not known." if may else ""
            )
            assert rest == named
        counts[bool(faster), bool(may)] += 1
    assert counts[False, True] and counts[False, False]


def test_a_hand_made_grid_is_ordered_by_speed_then_accuracy_with_what_is_not_known_last(tmp_path: Path) -> None:
    """Two formats and two corrections: of three that are answered one is slower than BF16, of equal speed the smaller
    loss is first, an unknown change after known ones, an unknown speed last."""
    grid = {
        "sizes": ["7b", "3m"], "lengths": [8192], "gpus": [8], "deploy": {"bf16": "BF16 weights"},
        "doses": ["none", "d"], "k3": {"none": "", "d": "1"}, "control": "bf16",
        "formats": ["int8", "int4", "nvfp4"], "corrections": ["none", "TIS"],
        "words": ["fast", "slow", "why", "-0.1", "-0.2", "no", "because"],
        "speeds": {"7b 8192 8": [[1.5, 0, 2], [0.5, 1, 2], [None, 5, 6]], "3m 8192 8": [[None, 5, 6]] * 3},
        "accuracies": {
            "7b 8192 bf16 none": [[False, None, 5, 6]] * 6,
            "7b 8192 bf16 d": [[True, -0.2, 4, 6], [True, -0.1, 3, 6], [True, -0.1, 3, 6], [False, None, 5, 6],
                               [False, -0.2, 4, 6], [False, -0.1, 3, 6]],
            "3m 8192 bf16 none": [[False, None, 5, 6]] * 6, "3m 8192 bf16 d": [[False, None, 5, 6]] * 6,
        },
    }  # fmt: skip
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "advise.json").write_text(json.dumps(grid))
    write_site(tmp_path)
    asked = [["7b", "8192", "8", dose, "bf16"] for dose in ("none", "d")] + [["3m", "8192", "8", "none", "bf16"]]
    none, known, without = answer(tmp_path, ASK % json.dumps(asked))
    assert [row[:2] for row in known["rows"][0]] == [
        ["int8", "TIS"],
        ["int8", "none"],
        ["bf16", "none"],
        ["int4", "none"],
    ]
    assert [row[:2] for row in known["rows"][1]] == [["int4", "TIS"], ["nvfp4", "TIS"], ["nvfp4", "none"]]
    assert known["rows"][0][0] == ["int8", "TIS", "fast", "-0.1", "Step: why. Accuracy: because."]
    assert known["words"] == "int8 with TIS: the fastest whose risk is answered, a step fast; accuracy -0.1."
    assert known["command"] == "lowbit advise --size 7b --length 8192 --gpus 8 --k3 1 --deploy bf16"
    assert [row[:2] for row in none["rows"][1]] == [
        [name, how] for name in ("int8", "int4", "nvfp4") for how in ("none", "TIS")]  # fmt: skip
    assert none["words"].endswith("The fastest that may be: int8, a step fast; its accuracy is not known.")
    assert none["command"] == "lowbit advise --size 7b --length 8192 --gpus 8 --deploy bf16"
    assert without["words"] == "bf16: no faster format has a change of accuracy that is known here."


LOOK = """
  const seen = (node) => node.getBoundingClientRect(), root = page.document.documentElement;
  const [name] = page.document.querySelectorAll("#advice-rows button"), evidence = name.closest("tr").nextSibling;
  const before = evidence.hidden; name.click();
  return {
    width: root.clientWidth, needed: root.scrollWidth, form: seen($("advice")).top, board: seen($("board")).top,
    hidden: $("advice").hidden,
    chosen: ["size", "length", "gpus", "dose", "deploy"].map((name) => $("a-" + name).value),
    table: $("advice-rows").parentElement.scrollWidth - $("advice-rows").parentElement.clientWidth,
    evidence: [before, evidence.hidden, name.getAttribute("aria-expanded")],
    lines: [...page.document.querySelectorAll("#advice-rows button")].map((one) => one.getClientRects().length),
  };"""


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_the_page_opens_at_the_form_and_fits_the_screen(site: Path, is_phone: bool) -> None:
    found = answer(site, LOOK, is_phone=is_phone)
    assert found["width"] == (390 if is_phone else 1280) and found["needed"] <= found["width"]
    assert not found["hidden"] and 0 < found["form"] < (400 if is_phone else 250) < found["board"]
    assert found["table"] <= 0 and set(found["lines"]) == {1}  # nothing to scroll sideways, no name broken
    assert found["chosen"] == ["7b", "8192", "8", TEXT, "bf16"]
    assert found["evidence"] == [True, False, "true"]


def test_without_answers_there_is_no_form(tmp_path: Path) -> None:
    write_site(tmp_path)
    assert answer(tmp_path, 'return [$("advice").hidden, $("a-size").options.length];') == [True, 0]
