"""Small twins of recipes under verl, on two ranks: every setting but the sizes, evaluations among them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.config.load import launch_of, split_launch
from harness.published.recipes.recipe import read_recipe
from harness.published.recipes.twin import twin
from harness.records.run_result import read_series
from harness.run.cell import run_cell
from harness.run.checks import check_place
from harness.sweep import plan

pytestmark = pytest.mark.verl


@pytest.mark.parametrize(("name", "arm"), [("fp8_rl", "BF16 + TIS"), ("qurl", "FP8 QuRL")])
def test_a_twin_runs_as_its_recipe_does_on_many_gpus(name: str, arm: str, tmp_path: Path) -> None:
    recipe, sweep = read_recipe(name), twin(read_recipe(name), tmp_path)[arm]
    words = {"gpus": "2", "micro_batch_tokens": "2048"}
    launch = launch_of(split_launch(sweep.overrides)[1] | words, results=str(tmp_path), sweep=sweep.name)
    (cell,) = plan(sweep, ["trainer=verl", "engine=vllm", "engine.gpu_memory=0.1"]).cells
    check_place(cell, launch)
    result = run_cell(cell, launch)
    assert (result.status, result.num_steps, result.error) == ("ok", 2, None)
    assert [(e.step, e.error) for e in result.evaluations] == [(0, None), (2, None)] * len(recipe.evaluations)
    series = read_series(tmp_path / "runs" / sweep.name, result.run_id)
    assert all(math.isfinite(value) for value in series["train/loss"])
    assert series["sync/num_replicas"] == [2.0, 2.0]
