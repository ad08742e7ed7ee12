"""Shares of answers by first mistake and of solved prompts, by hand on a small sweep, and where they are left out."""

from __future__ import annotations

import pytest

from harness.records.arms import group_arms
from harness.records.run_result import Base, RunResult
from harness.report.failures import blocks, by_base, failures_of
from tests.result_factory import result


def failing(method: str, precision: str, seed: int, shares: dict[str, float], length: float) -> RunResult:
    """A run whose last answers fail so; before training they fail in another way."""
    run = result(method, precision, seed=seed)[0]
    last = max(record.step for record in run.evals)
    evals = [
        record.model_copy(update={"failures": shares if record.step == last else {"plan": 1.0}, "length_mean": length})
        if record.site == "reference" else record
        for record in run.evals
    ]  # fmt: skip
    return run.model_copy(update={"evals": evals})


def test_shares_are_means_over_bases_beside_the_controls() -> None:
    runs = [
        failing("bf16", "bf16", 0, {"plan": 0.2, "form": 0.1}, 240.0),
        failing("bf16", "bf16", 1, {"plan": 0.4}, 242.0),
        failing("naive", "int8", 1, {"plan": 0.5, "operand": 0.25}, 250.0),
    ]
    (title, table, reading) = blocks(group_arms(runs), "bf16")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert title == "## How answers fail" and "first mistake" in reading
    assert rows[0] == ["arm", "bases", "tokens", "plan", "operand", "form"]
    assert rows[2] == ["bf16 bf16", "2", "241", "0.300", "0.000", "0.050"]
    assert rows[3] == ["naive int8", "1", "250 (+8)", "0.500 (+0.100)", "0.250 (+0.250)", "0.000 (+0.000)"]


def test_runs_of_a_base_count_once() -> None:
    runs = [
        failing("bf16", "bf16", 0, {"plan": share}, 240.0).model_copy(update={"base_seed": base, "run_id": f"{share}"})
        for share, base in ((0.1, 0), (0.3, 0), (0.8, 1))
    ]
    (arm,) = group_arms(runs)
    assert {base: shares["plan"] for base, shares in by_base(arm, failures_of).items()} == {
        Base(0, "aa"): pytest.approx(0.2),
        Base(1, "aa"): 0.8,
    }
    assert blocks([arm], "bf16")[1].splitlines()[2].startswith("| bf16 bf16 | 2 | 240 | 0.500 |")


def test_a_task_that_classifies_no_mistakes_has_no_section() -> None:
    runs = [result(method, precision)[0] for method, precision in (("bf16", "bf16"), ("naive", "int4"))]
    assert blocks(group_arms(runs), "bf16") == []
    failed = failing("naive", "int4", 0, {"plan": 0.5}, 9.0).model_copy(update={"status": "failed"})
    assert blocks(group_arms([failed]), "bf16") == []


def test_answers_without_a_mistake_count_as_such() -> None:
    runs = [failing("bf16", "bf16", seed, shares, 9.0) for seed, shares in ((0, {}), (1, {"form": 0.5}))]
    assert blocks(group_arms(runs), "bf16")[1].splitlines()[2] == "| bf16 bf16 | 2 | 9 | 0.250 |"


def test_solved_prompts_stand_beside_the_control_on_the_same_bases() -> None:
    known = {("bf16", 0): 0.9, ("bf16", 1): 0.8, ("naive", 1): 0.75, ("naive", 2): None}
    runs: list[RunResult] = []
    for (method, seed), best in known.items():
        run = result(method, "bf16" if method == "bf16" else "int8", seed=seed)[0]
        runs.append(run.model_copy(update={"summary": {**run.summary, "best_of_group_last": best}}))
    title, table, reading = blocks(group_arms(runs), "bf16")
    assert title == "## How many prompts a group solves" and "pass@k" in reading
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["arm", "bases", "best of a group"]
    assert rows[2:] == [["bf16 bf16", "2", "0.850"], ["naive int8", "1", "0.750 (-0.050)"]]
