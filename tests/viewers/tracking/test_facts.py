"""A result as tags, parameters and points: every number is the record's, and curves are thinned evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.records.run_result import TaskEvalRecord
from harness.viewers.tracking import facts
from tests import result_factory as factory

SHORT: dict[str, Any] = {"trainer__steps": 4, "trainer__eval_every": 2}
START, END = 1767225600_000, 1767225619_000
"""2026-01-01T00:00:00 UTC and 19 s later, in milliseconds."""


def test_curves_are_thinned() -> None:
    assert facts.chosen_steps([0.5] * 80, 20) == [80] and facts.chosen_steps([], 20) == []
    assert facts.chosen_steps([1.0, 2.0, 3.0], 20) == [1, 2, 3]
    steps = facts.chosen_steps([float(i) for i in range(81)], 20)
    assert len(steps) == 17 and steps[-1] == 81 and set(np.diff(steps)) == {5}
    assert facts.chosen_steps([0.5] * 3, None) == [1, 2, 3] and facts.chosen_steps([], None) == []


def test_a_mean_curve_ends_where_the_first_run_does() -> None:
    both = [{"reward/mean": [1.0, 2.0, 3.0], "other": [1.0]}, {"reward/mean": [3.0, 6.0], "other": [1.0]}]
    assert facts.mean_series(both) == {"reward/mean": [2.0, 4.0]} and facts.mean_series([]) == {}
    lacking = [{"reward/mean": [1.0], "part/TIS.cap": [2.0]}, {"reward/mean": [None], "part/TIS.cap": [4.0]}]
    assert facts.mean_series(lacking) == {"part/TIS.cap": [3.0]}


def test_a_mean_evaluation_is_over_runs_that_all_have_it() -> None:
    first, _ = factory.result(seed=0, **SHORT)
    second, _ = factory.result(seed=1, **SHORT)
    cut = second.model_copy(update={"evals": [e for e in second.evals if e.step < 4]})
    found = facts.mean_evaluations([first, cut])
    assert set(found) == {(site, step) for site in ("reference", "rollout") for step in (0, 2)}
    expected = [next(e.accuracy for e in run.evals if (e.site, e.step) == ("rollout", 2)) for run in (first, second)]
    assert found["rollout", 2] == pytest.approx(np.mean(np.array(expected, dtype=float)))


def test_points_of_a_cell_are_the_numbers_of_its_record() -> None:
    result, _ = factory.result("naive", "int4", **SHORT)
    asked = TaskEvalRecord(number=1, task="gsm8k", step=4, site="rollout", precision="int4", engine="vllm", k=2,
                           temperature=1.0, top_p=1.0, max_new_tokens=8,
                           scores={"avg@2": 0.25, "pass@2": 0.5, "greedy": None})  # fmt: skip
    result = result.model_copy(update={"evaluations": [asked], "memory_gib": {"engine": 0.25}})
    series = {"reward/mean": [0.1, None, 0.3, float("nan")], "part/TIS.mean": [1, 2, 3, 4], "mismatch/kl_k1": [9.0] * 4}
    found = {(p.name, p.step): (p.value, p.milliseconds) for p in facts.cell_points(result, series, None)}
    assert found["scores/auc", 0] == found["summary/auc", 0] == (result.summary["auc"], END)
    assert found["time/update_s", 0] == (8.0, END) and found["speed/rollout_tokens_per_s", 0] == (4e4, END)
    assert found["system/peak_memory_gib", 0] == (0.5, END) and found["system/engine_gib", 0] == (0.25, END)
    assert found["task/1_gsm8k_rollout/avg_at_2", 4] == (0.25, END)
    assert found["task/1_gsm8k_rollout/pass_at_2", 4] == (0.5, END)
    assert not any("greedy" in name for name, _ in found)  # it was not measured
    assert {step for name, step in found if name == "reward/mean"} == {1, 3}  # no hole, no NaN
    assert found["reward/mean", 3] == (0.3, START + 19_000 * 3 // 4)
    assert [found["part/TIS.mean", step][0] for step in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    assert not any(name == "mismatch/kl_k1" for name, _ in found)  # not among CURVES
    evals = {(name, step): value for (name, step), (value, _) in found.items() if name.startswith("eval/")}
    assert evals == {(f"eval/accuracy_{e.site}", e.step): e.accuracy for e in result.evals} and len(evals) == 6


def test_an_arm_is_its_setting_without_seeds() -> None:
    keys = {facts.arm_key(factory.result("flashrl", "int4", seed=seed)[0]) for seed in range(3)}
    assert len(keys) == 1 and len(next(iter(keys))) == 8
    other: dict[str, Any] = {"knobs": {"TIS": {"cap": 4.0}}}
    assert facts.arm_key(factory.result("flashrl", "int4", **other)[0]) not in keys
    assert facts.plain_name(factory.result("flashrl", "int4", **other)[0]) == "flashrl int4 s n=8"
    assert facts.plain_name(factory.result("naive", "int4", "bypass_ppo")[0]) == "naive int4 s n=8 bypass_ppo"


def test_tags_and_parameters_are_text_and_leave_out_what_is_not_there() -> None:
    result, _ = factory.result("naive", "int4", engine__max_new_tokens=96, status="failed")
    result = result.model_copy(update={"reason": "x" * 9000, "launch": {"packing": True}})
    tags, params = facts.cell_tags("quick", result), facts.cell_params(result)
    assert (tags["n"], tags["length"], tags["max_new_tokens"]) == ("8", "96", "96")  # a limit counts as the length
    assert tags["status"] == "failed" and len(tags["reason"]) == 8000 and tags["is_draft"] == "false"
    assert "question_hash" not in tags and "parts" not in tags  # it was never scored, and naive has no parts
    assert facts.setting_tags(factory.result("bf16")[0])["length"] == "8"
    assert params["precision.weights"] == "int4" and params["launch.packing"] == "True"
    assert params["package.torch"] == "2.13.0" and "precision.acts" not in params and "model.path" not in params


def test_times_are_milliseconds_since_1970() -> None:
    assert facts.milliseconds("2026-01-01T00:00:00+00:00") == START and facts.milliseconds(None) is None
    assert facts.milliseconds("2026-01-01T00:00:00") == START
