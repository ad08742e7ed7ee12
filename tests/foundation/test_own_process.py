"""Processes of this project in a working directory whose files have the names of modules that they import."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.foundation.own_process import code_path, exit_code, module_command
from harness.foundation.provenance import ROOT
from harness.records.paths import runs_folder
from harness.records.run_result import read_results
from tests.sweep.launchers.stand_in import gone

FOREIGN = 'raise RuntimeError("a file of the working directory was imported")\n'
RUN = (
    "run", "method=naive", "precision=int8", "model=xs", "task=chain", "task.n=2", "task.num_eval=8", "model.spread=0",
    "trainer.steps=1", "algo.num_prompts=2", "algo.group_size=2", "base.max_steps=1", "base.target_accuracy=0.0",
)  # fmt: skip


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with packages `harness` and `methods` and a module `queue` that are not ours."""
    for name in ("harness/__init__.py", "methods/__init__.py", "queue.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FOREIGN)
    return tmp_path


def test_the_working_directory_shadows_no_module(foreign: Path) -> None:
    command = module_command("harness.cli.main", *RUN, "--results", "found")
    done = subprocess.run(command, cwd=foreign, env=os.environ | code_path(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = read_results(runs_folder(foreign / "found"))
    assert (result.status, result.num_steps) == ("ok", 1)


@pytest.mark.skipif(find_spec("ray") is None, reason="the ray extra is not installed")
def test_the_working_directory_shadows_no_module_of_a_ray_worker(foreign: Path) -> None:
    sweep = {"question": "?", "overrides": list(RUN[3:]), "arms": [{"method": "bf16"}], "seeds": [0]}
    (foreign / "tiny.yaml").write_text(json.dumps(sweep))  # JSON is YAML
    words = ("sweep", "tiny.yaml", "--launcher", "ray", "--workers", "1", "--results", "found", "--no-tracking")
    command = module_command("harness.cli.main", *words)
    done = subprocess.run(command, cwd=foreign, env=os.environ | code_path(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = read_results(runs_folder(foreign / "found", "tiny"))
    assert (result.status, result.num_steps) == ("ok", 1)


def test_a_plain_start_would_be_shadowed(foreign: Path) -> None:
    command = [word for word in module_command("harness.cli.main", "methods") if word != "-P"]
    done = subprocess.run(command, cwd=foreign, env=os.environ | code_path(), capture_output=True, text=True)
    assert done.returncode == 1 and "a file of the working directory was imported" in done.stderr


def test_our_code_leads_what_pythonpath_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", "", "/b"]))
    monkeypatch.chdir(tmp_path)
    whole = os.pathsep.join([str(ROOT), str(tmp_path / "a"), "/b"])
    assert code_path() == {"PYTHONPATH": whole}
    monkeypatch.setenv("PYTHONPATH", whole)
    assert code_path() == {"PYTHONPATH": whole}
    monkeypatch.delenv("PYTHONPATH")
    assert code_path() == {"PYTHONPATH": str(ROOT)}


def test_a_command_has_an_exit_code_and_nothing_of_it_lives_at_its_end_or_past_its_limit(tmp_path: Path) -> None:
    assert exit_code(["sh", "-c", "exit 3"], 60) == 3
    own = tmp_path / "pid"
    assert exit_code(["sh", "-c", f"sleep 60 & echo $! > {own}; exit 3"], 60) == 3
    assert gone(int(own.read_text()))
    assert exit_code(["sh", "-c", f"sleep 60 & echo $! > {own}; wait"], 1.0) is None
    assert gone(int(own.read_text()))
