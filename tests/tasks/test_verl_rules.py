"""Reward rules against verl's own scores of random and tricky answers (tests/oracles/make_verl_rewards.py)."""

import json

import pytest

from harness.tasks import Score
from harness.tasks.math_reward import MathGrader
from harness.tasks.verl_rules import answer_tag, normalized
from tests.source_tree import ROOT

ROWS = json.loads((ROOT / "tests" / "oracles" / "verl_rewards.json").read_text())["rows"]


@pytest.mark.parametrize("rule", ["verl_gsm8k", "verl_gsm8k_flexible", "dapo", "math_verify"])
def test_rewards_are_those_of_verl(rule):
    grader = MathGrader(num_workers=2, timeout_s=10.0, rule=rule)
    found = grader.grade([row["reference"] for row in ROWS], [row["text"] for row in ROWS])
    grader.close()
    theirs = [row[rule][1] if rule == "dapo" else row[rule] for row in ROWS]
    wrong = [(row, score) for row, score, reward in zip(ROWS, found, theirs, strict=True) if score.reward != reward]
    assert wrong == []
    assert 20 < sum(theirs) < len(ROWS) - 20  # the answers tell right from wrong
    if rule == "dapo":  # +1 and -1 there
        assert all(row["dapo"][0] == 2 * score.reward - 1 for row, score in zip(ROWS, found, strict=True))


def test_the_rules_differ_from_each_other_on_the_same_answer():
    text = "First \\boxed{5}.\n#### 7\nAnswer: 9"
    rights = {}
    for rule in ("own", "verl_gsm8k", "verl_gsm8k_flexible", "dapo"):
        grader = MathGrader(num_workers=1, rule=rule)
        rights[rule] = [grader.grade([gold], [text])[0].reward for gold in ("5", "7", "9")]
        grader.close()
    assert rights == {
        "own": [0.0, 1.0, 0.0], "verl_gsm8k": [0.0, 1.0, 0.0], "verl_gsm8k_flexible": [0.0, 0.0, 1.0],
        "dapo": [0.0, 0.0, 1.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> no, <answer> 42 </answer>", (True, "42")),
        ("<answer>43</answer>", (False, "43")),
        ("<answer>4\n2</answer>", (False, "4\n2")),
        ("42", (False, None)),
        ("<answer>42", (False, None)),
    ],
)
def test_the_answer_in_its_tag(text, expected):
    assert answer_tag(text, "42") == expected


def test_normalized_answers_of_the_minerva_rule():
    assert normalized("x = 1,234 dollars") == "1234"
    assert normalized("\\frac12") == "\\frac{1}{2}"
    assert normalized("$\\text{an apple}$") == "apple"


def test_an_unparsable_answer_is_told_from_a_wrong_one():
    grader = MathGrader(num_workers=1, rule="dapo")
    assert grader.grade(["1", "1"], ["Answer: 2", "no"]) == [Score(0.0, True, answer="2"), Score(0.0, False)]
    grader.close()
