"""`lowbit sweep`: the launcher that is asked for, places that a launcher cannot have, and a sweep by jobs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main as cli
from harness.cli.sweep import LAUNCHERS, Way, _check_places
from harness.config.schema import Launch
from harness.records.run_result import read_result
from harness.sweep.folder_time import HERE, Machine
from harness.sweep.launchers import local, slurm
from tests.toy import small_config, small_launch

SWEEP = """
question: Does it?
overrides: [model=xs, task=chain, model.spread=0, trainer.steps=2, trainer.eval_every=2, task.num_eval=16,
            algo.num_prompts=4, algo.group_size=4]
arms:
  - {method: bf16}
seeds: [0, 1]
"""


def test_the_launcher_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Way(workers=3).runner()
    assert (runner.func, runner.keywords) == (local.run_cells, {"workers": 3})  # type: ignore[attr-defined]
    monkeypatch.setattr(slurm, "check", lambda options: None)
    runner = Way(workers=2, launcher="slurm", slurm=("partition=gpu", "time=30")).runner()
    assert runner.func is slurm.run_cells  # type: ignore[attr-defined]
    assert runner.keywords == {"workers": 2, "options": {"partition": "gpu", "time": "30"}}  # type: ignore[attr-defined]
    assert LAUNCHERS == ("local", "ray", "slurm")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slurm": ("time=3",)}, "slurm=time=3: only with --launcher slurm"),
        ({"launcher": "ray", "slurm": ("time=3",)}, "slurm=time=3: only with --launcher slurm"),
        ({"launcher": "slurm", "ray_address": "x:1"}, "ray-address=x:1: only with --launcher ray"),
        ({"launcher": "slurm", "slurm": ("time=soon",)}, "slurm=time=soon: valid: a whole number above 0, in minutes"),
    )
    for options, said in wrong:
        with pytest.raises(ValueError, match=said):
            Way(workers=1, **options)


def test_a_preview_refuses_what_a_run_would_refuse_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    verl = ("trainer=verl", "engine=vllm", "model=xs128")
    for words, said in (
        (("launch.gpus=2",), "launch.nodes=1 launch.gpus=2: trainer=local works on one GPU; choose trainer=verl"),
        (("launch.offload=all",), "launch.offload=all: trainer=verl alone does it; valid: none, or trainer=verl"),
        ((*verl, "launch.gpus=2", "launch.tensor_parallel=3"), "launch.tensor_parallel=3: an engine's GPUs are of one"),
        ((*verl, "launch.save=every:2"), "launch.save=every:2: trainer=verl keeps the last policy alone; valid: none"),
        (("launch.nodes=2", "--launcher", "ray"), "launch.nodes=2 launch.gpus=1: trainer=local works on one GPU"),
        ((*verl, "--launcher", "ray"), "trainer=verl: with --launcher ray its checkpoints would stay on their node; "),
        (("launch.save=hf", "--launcher", "ray"), "launch.save=hf: with --launcher ray the policy would stay on its"),
        (("--launcher", "slurm", "--slurm", "tim=3"), "slurm=tim=3: no option 'tim'; nearest: time"),
    ):
        results = tmp_path / "results"
        assert cli.main(["sweep", str(tmp_path / "tiny.yaml"), *words, "--dry-run", "--results", str(results)]) == 2
        assert capsys.readouterr().err.startswith(f"lowbit: error: {said}"), words
    assert cli.main(["run", "launch.gpus=2", "--dry-run"]) == 2
    assert "launch.gpus=2: trainer=local works on one GPU" in capsys.readouterr().err


def test_a_cell_away_from_here_runs_on_one_node_with_its_own_ray() -> None:
    """GPUs are asked of the node, not of this machine; trainer=verl runs in jobs, too, and in no task of Ray, which
    brings no checkpoint of it home."""
    cells, local_cells = [small_config("method=bf16", "trainer=verl", "engine=vllm")], [small_config("method=bf16")]
    jobs, ray = Way(workers=1, launcher="slurm"), Way(workers=1, launcher="ray")
    for way in (Way(workers=1), jobs, ray):
        with pytest.raises(ValueError, match=r"launch\.gpus=8: trainer=local works on one GPU"):
            _check_places(local_cells, Launch(gpus=8), way)
    named = Launch(ray_address="head:6379")
    for launch in (Launch(gpus=8), Launch(save="hf"), named):
        _check_places(cells, launch, jobs)
        with pytest.raises(ValueError, match=r"^trainer=verl: with --launcher ray .* valid: trainer=local, or"):
            _check_places(cells, launch, ray)
    with pytest.raises(ValueError, match="nodes=2: with --launcher slurm a cell runs on one node; valid: 1"):
        _check_places(cells, Launch(nodes=2), jobs)
    _check_places(local_cells, Launch(), ray)
    with pytest.raises(ValueError, match=r"launch\.ray_address=head:6379: with --launcher ray a cell has a Ray of its"):
        _check_places(local_cells, named, ray)
    with pytest.raises(ValueError, match=r"launch\.save=hf: with --launcher ray .* valid: none, or --launcher local"):
        _check_places(local_cells, Launch(save="hf"), ray)


def test_a_forecast_is_for_all_gpus_of_a_cell() -> None:
    way = Way(workers=1, gpu="h100", memory_gib=80.0)
    assert way.machine(Launch(gpus=4, nodes=2)) == Machine(gpus=8, gpu="h100", memory_gib=80.0)
    assert way.machine(Launch(gpus=4, tensor_parallel=2)).engine_gpus == 2
    for away in (Way(workers=1, launcher="slurm"), Way(workers=1, launcher="ray", ray_address="head:6379")):
        assert away.machine(Launch()) == Machine(is_cluster=True)
    assert Way(workers=1, launcher="ray").machine(Launch()) == HERE


@pytest.mark.skipif(find_spec("submitit") is None, reason="the slurm extra is not installed")
def test_a_sweep_by_jobs_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user calls it; the same command then finds nothing to do."""
    small_launch(tmp_path / "results")  # its bases
    (tmp_path / "jobs.yaml").write_text(SWEEP)
    line = ["sweep", str(tmp_path / "jobs.yaml"), "--launcher", "slurm", "--slurm", "cluster=local", "--workers", "2",
            "--no-tracking", "--results", str(tmp_path / "results")]  # fmt: skip
    assert cli.main(line) == 0
    records = sorted((tmp_path / "results" / "runs" / "jobs").glob("*.json"))
    assert [read_result(path).status for path in records] == ["ok", "ok"]
    assert {read_result(path).seed for path in records} == {0, 1}
    capsys.readouterr()
    assert cli.main(line) == 0
    assert "all 2 cells are finished, nothing to run" in capsys.readouterr().out
