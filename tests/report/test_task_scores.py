"""Scores of `evaluations` by arm: means of brute-force scores, of the last answers, and their intervals."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli.runs import runs_table
from harness.records.run_result import RunResult, TaskEvalRecord, write_result
from harness.records.sample_scores import over_questions, over_seeds
from harness.report.task_scores import HEAD, TaskScore, cells, last_answers, task_scores
from tests import result_factory as factory

K, QUESTIONS = 4, 12


def asked(seed: int, **values: Any) -> TaskEvalRecord:
    """Answers of one run: an answer is right where it is class 0, and one in six cannot be read."""
    rng = np.random.default_rng(seed)
    answers = rng.integers(0, 3, (QUESTIONS, K)) - (rng.random((QUESTIONS, K)) < 1 / 6) * 9
    answers = np.where(answers < 0, -1, answers)
    fields: dict[str, Any] = {
        "number": 0, "task": "gsm8k", "step": 80, "site": "rollout", "precision": "int8", "engine": "vllm", "k": K,
        "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "question_hash": "q", "answers": answers.tolist(),
        "correct": (answers == 0).astype(int).tolist(), "greedy": rng.integers(0, 2, QUESTIONS).tolist(),
    }  # fmt: skip
    return TaskEvalRecord(**(fields | values))


def runs(*seeds: int, method: str = "naive", **values: Any) -> list[RunResult]:
    """Runs of an arm, each asked once."""
    return [
        factory.result(method, "int8", seed=seed)[0].model_copy(update={"evaluations": [asked(seed, **values)]})
        for seed in seeds
    ]


def by_hand(record: TaskEvalRecord) -> dict[str, float]:
    """Every score by going through all choices of samples and all ways to break a tie."""
    correct, answers = record.correct, record.answers
    found = {f"avg@{K}": np.mean(correct), "greedy": np.mean(record.greedy)}
    for k in (1, 2, 4):
        found[f"pass@{k}"] = np.mean([np.mean([max(some) for some in combinations(row, k)]) for row in correct])
    votes: list[float] = []
    for classes in answers:
        read = Counter(one for one in classes if one != -1)
        best = [one for one, count in read.items() if count == max(read.values())]
        votes.append(sum(one == 0 for one in best) / len(best) if best else 0.0)
    return {name: float(value) for name, value in (found | {f"maj@{K}": np.mean(votes)}).items()}


def test_every_score_is_the_mean_over_seeds_and_questions_by_brute_force() -> None:
    found = task_scores(runs(0, 1, 2))
    one_each = [by_hand(asked(seed)) for seed in (0, 1, 2)]
    assert {row.name: row.interval.mean for row in found} == pytest.approx(
        {name: np.mean([one[name] for one in one_each]) for name in one_each[0]}
    )
    assert [row.name for row in found] == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4", "greedy"]
    means = {row.name: row.interval.mean for row in found}
    assert means["avg@4"] == means["pass@1"] < means["pass@2"] < means["pass@4"] and means["maj@4"] != means["avg@4"]
    for row in found:
        assert (row.arm, row.task, row.site, row.precision, row.step) == ("naive int8", "gsm8k", "rollout", "int8", 80)
        assert (row.seeds, row.questions) == (3, QUESTIONS) and row.interval.low < row.interval.mean < row.interval.high


def test_the_interval_of_one_seed_is_over_its_questions_and_of_more_over_both() -> None:
    (one, *_), record = task_scores(runs(0)), asked(0)
    assert one.interval == over_questions(np.mean(record.correct, axis=1)) and one.seeds == 1

    def width(*levels: float) -> float:
        """Width for two seeds, whose questions all score alike within a seed."""
        made = runs(0, 1)
        for run, level in zip(made, levels, strict=True):
            run.evaluations[0] = asked(0, correct=[[1] * round(K * level) + [0] * round(K - K * level)] * QUESTIONS)
        interval = task_scores(made)[0].interval
        assert interval.mean == pytest.approx(sum(levels) / 2)
        return interval.high - interval.low

    assert width(0.25, 0.75) > 1.5 * width(0.5, 0.5)  # seeds that differ say less


def test_runs_of_one_base_are_one_unit() -> None:
    """Three runs of one base and one of another, asked the same questions: the interval is that of two bases."""
    made = [run.model_copy(update={"base_seed": int(seed == 3)}) for seed, run in enumerate(runs(0, 1, 2, 3))]
    row = next(row for row in task_scores(made) if row.name == "greedy")
    greedy = np.array([asked(seed).greedy for seed in range(4)], float)
    assert row.seeds == 4 and row.interval == over_seeds(np.stack([greedy[:3].mean(0), greedy[3]]))


def test_the_last_answers_that_did_not_fail_count() -> None:
    (run,) = runs(0)
    records = [
        asked(9, step=40), asked(0, step=80), asked(7, step=60), asked(8, step=80, site="reference", precision="fp32"),
        asked(6, step=80, number=1, task="aime24"),
        asked(5, step=120, error="no memory", correct=[], answers=[], greedy=[]),
    ]  # fmt: skip
    run = run.model_copy(update={"evaluations": records})
    assert last_answers(run) == [records[3], records[1], records[4]]
    found = {(row.task, row.site, row.step, row.name): row.interval.mean for row in task_scores([run])}
    assert found["gsm8k", "rollout", 80, "avg@4"] == pytest.approx(by_hand(records[1])["avg@4"])
    assert found["gsm8k", "reference", 80, "maj@4"] == pytest.approx(by_hand(records[3])["maj@4"])
    assert found["aime24", "rollout", 80, "greedy"] == pytest.approx(by_hand(records[4])["greedy"])
    assert len(found) == 18 and task_scores([factory.result()[0]]) == []


def test_a_run_that_did_not_finish_is_not_scored() -> None:
    finished, failed, stopped = runs(0, 1, 2)
    left = [failed.model_copy(update={"status": "failed"}), stopped.model_copy(update={"status": "cancelled"})]
    assert task_scores([finished, *left]) == task_scores([finished]) and task_scores(left) == []


def test_seeds_that_cannot_be_averaged_have_rows_of_their_own() -> None:
    """Other questions, another number of steps, or another arm."""
    other_questions, earlier = runs(1, question_hash="r"), runs(2, step=60)
    found = task_scores([*runs(0), *other_questions, *earlier, *runs(3, method="flashrl")])
    rows = [row for row in found if row.name == "avg@4"]
    assert [(row.arm, row.step, row.seeds) for row in rows] == [
        ("naive int8", 80, 1), ("naive int8", 80, 1), ("naive int8", 60, 1), ("flashrl int8", 80, 1)]  # fmt: skip
    assert [row.interval.mean for row in rows] == pytest.approx([by_hand(asked(seed))["avg@4"] for seed in range(4)])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"greedy": []}, ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4"]),
        ({"answers": []}, ["avg@4", "pass@1", "pass@2", "pass@4", "greedy"]),
        ({"correct": [], "answers": []}, ["greedy"]),
        ({"correct": [[1]] * QUESTIONS, "answers": []}, ["avg@1", "greedy"]),
        ({"correct": [[1, 0, 1]] * QUESTIONS, "answers": []}, ["avg@3", "pass@1", "pass@2", "pass@3", "greedy"]),
    ],
)
def test_what_was_not_asked_has_no_score(values: dict[str, Any], names: list[str]) -> None:
    assert [row.name for row in task_scores(runs(0, 1, **values))] == names


def test_a_single_question_has_a_mean_alone() -> None:
    (row,) = task_scores(runs(0, correct=[], answers=[], greedy=[1]))
    assert math.isnan(row.interval.low) and cells(row)[-3:] == ("1", "1", "1.000")
    (row,) = task_scores(runs(0, 1, correct=[], answers=[], greedy=[1]))
    assert math.isnan(row.interval.low) and cells(row)[-3:] == ("2", "1", "1.000")


def test_rows_as_text_stand_under_their_heads(tmp_path: Path) -> None:
    made = runs(0, 1)
    rows = task_scores(made)
    assert all(isinstance(row, TaskScore) and len(cells(row)) == len(HEAD) for row in rows)
    assert cells(rows[0])[:8] == ("naive int8", "gsm8k", "rollout", "int8", "80", "avg@4", "2", "12")
    assert cells(rows[0])[8] == str(rows[0].interval) and "[" in cells(rows[0])[8]
    for run in made:
        write_result(tmp_path / "runs" / "quick", run, None)
    text = runs_table(tmp_path, "quick")
    for row in rows:
        assert any(row.name in line and str(row.interval) in line for line in text.splitlines())
    assert "Scores of `evaluations` after the last step" in text
    head, line = (next(line for line in text.splitlines() if start in line) for start in ("arm, and", made[0].name))
    for name, key in (("AUC", "auc"), ("accuracy", "final_accuracy")):
        assert line[head.index(name) :].startswith(f"{made[0].summary[key]:.3f} ")
