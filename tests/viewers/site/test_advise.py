"""The site's first form: in a browser it gives the answers of `lowbit advise`, row by row, and the command it names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.cli.advise import USUAL
from harness.cli.main import parse
from harness.studies.advise.accuracy import STANDINGS
from harness.studies.advise.answers import MISMATCHES, answers, write_answers
from harness.studies.advise.question import DEPLOY, Question, given_mismatch
from harness.studies.advise.recipes import advise
from harness.studies.advise.report import cells
from harness.viewers.site import write_site
from tests.source_tree import ROOT
from tests.studies.advise.made import evidence, tables
from tests.viewers.browser import answer

QUESTIONS = [
    [size, length, gpus, mismatch, deploy]
    for size, length, gpus in (("0.5b", 16384, 16), ("7b", 250, 1), ("7b", 8192, 8), ("32b", 1024, 1))
    for mismatch in MISMATCHES
    for deploy in DEPLOY
]
ASK = """
  return %s.map((asked) => {
    ["size", "length", "gpus", "mismatch", "deploy"].forEach((name, i) => { $("a-" + name).value = asked[i]; });
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of one packed sweep with the grid of answers."""
    folder = tmp_path_factory.mktemp("advice")
    (folder / "packed").mkdir()
    (folder / "packed" / "length.zip").symlink_to(ROOT / "results" / "packed" / "length.zip")
    write_answers(answers(evidence(), tables()), folder / "tables")
    write_site(folder, ["length"])
    return folder


@pytest.fixture(scope="module")
def shown(site: Path) -> list[dict[str, Any]]:
    """The page's answers to every question."""
    return answer(site, ASK % json.dumps(QUESTIONS))


def test_every_answer_is_that_of_the_command_it_names(shown: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for (size, length, gpus, mismatch, deploy), page in zip(QUESTIONS, shown, strict=True):
        program, *words = shlex.split(page["command"])
        a = parse(words)
        assert (program, a.size, a.length, a.gpus, a.deploy) == ("lowbit", size, length, gpus, deploy)
        assert a.batch is None and USUAL["batch"] == 512, "the grid is of 512 answers a step"
        assert mismatch in (a.k3, MISMATCHES[0]) and (a.k3 is None) == (mismatch == MISMATCHES[0])
        asked = Question(
            size=a.size, length=a.length, gpus=a.gpus, deploy=a.deploy, mismatch=given_mismatch(a.k3) if a.k3 else {}
        )
        wanted = advise(evidence(), tables()[deploy], asked)
        parts = [found for standing in STANDINGS if (found := wanted.of(standing))]
        seen |= {recipe.accuracy.standing for recipe in wanted.recipes}
        for rows, recipes in zip(page["rows"], parts, strict=True):
            assert [tuple(row[:-1]) for row in rows] == [cells(recipe) for recipe in recipes]
            for row, recipe in zip(rows, recipes, strict=True):
                if not recipe.is_control:
                    assert row[-1].startswith(f"Step: {recipe.speed.words}. Accuracy: 240 tokens: ")
    assert seen == {*STANDINGS}


def test_the_sentence_names_the_fastest_that_equals_bf16(shown: list[dict[str, Any]]) -> None:
    counts = [0, 0]
    for page in shown:
        name, correction, step = page["rows"][0][0][:3]
        is_faster = name != "bf16" and step[0].isdigit() and float(step.split()[0]) > 1
        counts[is_faster] += 1
        said = f"{name} with {correction}" if correction != "none" else name
        assert page["words"] == (
            f"{said}: the fastest that equals BF16 rollouts on word problems. Step: {step}."
            if is_faster else "bf16: no faster format is known that equals BF16 rollouts on word problems."
        )  # fmt: skip
    assert min(counts) > 0


LOOK = """
  const seen = (node) => node.getBoundingClientRect(), root = page.document.documentElement;
  const [name] = page.document.querySelectorAll("#advice-rows button"), evidence = name.closest("tr").nextSibling;
  const before = evidence.hidden; name.click();
  return {
    width: root.clientWidth, needed: root.scrollWidth, form: seen($("advice")).top, board: seen($("board")).top,
    hidden: $("advice").hidden,
    chosen: ["size", "length", "gpus", "mismatch", "deploy"].map((name) => $("a-" + name).value),
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
    assert found["chosen"] == ["7b", "8192", "8", MISMATCHES[0], "bf16"]
    assert found["evidence"] == [True, False, "true"]


def test_without_answers_there_is_no_form(tmp_path: Path) -> None:
    write_site(tmp_path)
    assert answer(tmp_path, 'return [$("advice").hidden, $("a-size").options.length];') == [True, 0]
