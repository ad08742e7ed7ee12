"""Evaluations on tasks of their own through whole runs: matrices in the record, failures that cost no run, resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.load import run_id
from harness.records.run_result import read_result
from harness.records.sample_scores import scores_of
from harness.run.cell import run_cell
from harness.run.checks import check
from harness.run.loop import evaluate
from harness.tasks.digits import exact_match
from tests.toy import small_config, small_launch, small_run

ENTRIES = (
    "evaluations=[{task:chain,num:6,k:4,greedy:true,options:{n:8}},{task:sort,num:5,k:0,greedy:true,options:{n:4}},"
    "{task:chain,num:3,k:2,temperature:0.6,top_p:0.5,max_new_tokens:2}]"
)


def test_a_run_records_matrices_of_every_task_at_both_sites(tmp_path: Path) -> None:
    config = small_config("method=naive", "precision=int8", ENTRIES)
    plain = run_cell(small_config("method=naive", "precision=int8"), small_launch(tmp_path))
    result = run_cell(config, small_launch(tmp_path))
    assert result.status == "ok", result.error
    assert result.evals == plain.evals  # nothing else moves
    assert result.hashes["final"] == plain.hashes["final"]
    found = [(e.number, e.task, e.step, e.site, e.precision) for e in result.evaluations]
    assert found == [
        (number, task, step, site, precision) for step in (0, 2, 4)
        for site, precision in (("reference", "fp32"), ("rollout", "int8"))
        for number, task in ((0, "chain"), (1, "sort"), (2, "chain"))
    ]  # fmt: skip
    for e in result.evaluations:
        assert e.error is None
        shapes = {0: ((6, 4), 6), 1: ((0,), 5), 2: ((3, 2), 0)}[e.number]
        assert (np.shape(e.correct), len(e.greedy)) == shapes
        assert e.scores == pytest.approx(scores_of(e.model_dump()))
    short = [e for e in result.evaluations if e.number == 2]
    assert all(e.truncated_frac == 1.0 and e.length_mean == 2.0 for e in short)
    assert set(result.hashes) >= {"evaluations.0", "evaluations.1", "evaluations.2"}
    path = tmp_path / "runs" / "test" / f"{run_id(config)}.json"
    assert read_result(path) == result
    assert sum(line.startswith('  {"number"') for line in path.read_text().splitlines()) == len(result.evaluations)


def test_greedy_answers_are_those_of_the_engine(tmp_path: Path) -> None:
    run = small_run(tmp_path, [ENTRIES])
    evaluate(run)
    first, one = run.evaluations[0], run.asked[0]
    run.reference.wake()
    rollout = run.reference.generate(
        [item.prompt for item in one.items], num_samples=1, max_new_tokens=one.task.max_new_tokens, temperature=0.0,
        seed=1,
    )  # fmt: skip
    right = [score.reward for score in exact_match(one.items, rollout.responses())]
    assert first.greedy == right and sum(right) > 0


def failing(run: Any) -> Callable[..., Any]:
    sample = run.engine.generate

    def generate(*words: Any, **named: Any) -> Any:
        if "top_p" in named:
            raise RuntimeError("CUDA out of memory")
        return sample(*words, **named)

    return generate


def test_a_failed_evaluation_is_recorded_and_fails_nothing(tmp_path: Path) -> None:
    run = small_run(tmp_path, [ENTRIES])
    run.engine.generate = failing(run)  # type: ignore[method-assign]
    evaluate(run)
    errors = [e.error for e in run.evaluations]
    assert errors == [None] * 3 + ["RuntimeError: CUDA out of memory"] * 3
    assert run.evaluations[3].correct == [] and run.evaluations[3].scores == {}
    assert len(run.evals) == 2
    again = small_run(tmp_path, [ENTRIES])
    again.restore(run.state())
    assert again.evaluations == run.evaluations


def test_answers_without_log_probs_are_a_failed_evaluation(tmp_path: Path) -> None:
    run = small_run(tmp_path, [ENTRIES])
    sample = run.engine.generate

    def generate(*words: Any, **named: Any) -> Any:
        rollout = sample(*words, **named)
        if named["temperature"] == 0.6:
            rollout.logp[-1, 1] = float("nan")
        return rollout

    run.engine.generate = generate  # type: ignore[method-assign]
    evaluate(run)
    said = "RuntimeError: the engine's log-probs of 1 of 12 tokens are NaN"
    assert [e.error for e in run.evaluations] == [None] * 5 + [said]


def test_the_last_evaluation_cannot_fail_a_finished_run(tmp_path: Path) -> None:
    from harness.run.loop import train

    run = small_run(tmp_path, ["trainer.steps=1"])
    sample = run.reference.generate

    def generate(*words: Any, **named: Any) -> Any:
        if run.step == 1:
            raise RuntimeError("CUDA out of memory")
        return sample(*words, **named)

    run.reference.generate = generate  # type: ignore[method-assign]
    train(run, lambda _: None)
    assert run.step == 1 and run.evaluation_errors == ["step 1: RuntimeError: CUDA out of memory"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=zero_mismatch", "engine.max_batch=16", "evaluations=[{task:chain,num:1,top_p:0.5}]"],
         r"evaluations.0.top_p=0.5: zero_mismatch samples with the trainer's own module"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_sample_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(small_config(*words))
