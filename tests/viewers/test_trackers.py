"""Trackers by name: what is missing is said before a run, and one that fails holds up neither the others nor a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.records.packed import pack
from harness.viewers import trackers
from tests.source_tree import ROOT
from tests.viewers.cases import new_results, runs


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers.check_installed(["mlflow"])
    said = r"tracking=no_tool: no_tool is not installed; pip install 'lowbit-rl-bench\[no_tool\]'"
    with pytest.raises(ValueError, match=said):
        trackers.check_installed(["mlflow", "no_tool"])
    (tmp_path / "no_tool").mkdir()  # what a tracker writes where it runs is not the package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        trackers.check_installed(["no_tool"])


@pytest.mark.parametrize(
    "words", [["sweep", "smoke"], ["paper", "dapo"], ["search", "search_clip"], ["results", "import"]]
)
def test_commands_refuse_a_tracker_that_is_missing_before_they_begin(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.viewers.trackers.find_spec", lambda name: None)
    assert main([*words, "--tracking", "mlflow,wandb", "--results", str(tmp_path / "results")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: tracking=") and "pip install 'lowbit-rl-bench[" in err
    assert err.count("\n") == 1 and not (tmp_path / "results").exists()


def test_what_fails_is_counted_as_nothing_and_the_others_get_all(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    (results / "wandb").write_text("where its folder would be")
    assert trackers.track(results, "quick", ("wandb", "mlflow")) == 3
    assert "warning: W&B is off, runs go on: " in capsys.readouterr().err
    assert trackers.log_all(results, "mlflow")[0] == 0 and len(runs(results)["bf16 bf16, seed 0"]) == 1
    assert trackers.track(results, "quick", ()) == 0


def test_results_import_logs_packed_sweeps_and_says_how_many(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    pack(results, "quick")
    for path in (results / "runs" / "quick").iterdir():
        path.unlink()
    (results / "runs" / "quick").rmdir()
    assert main(["results", "import", "--results", str(results)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "logged 3 runs to mlflow"
    assert {"bf16 bf16, seed 0", "naive int4, seed 0", "flashrl int4, seed 0"} <= set(runs(results))
    assert main(["results", "import", "--results", str(results)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "logged 0 runs to mlflow"
    assert main(["results", "import", "--no-tracking", "--results", str(results)]) == 2
    said = "results import: --no-tracking leaves nothing to do; give a source, or a tracker"
    assert said in capsys.readouterr().err


def test_results_import_fails_where_a_tracker_is_off(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    (results / "mlflow" / "mlflow.db").write_bytes(b"this is no database" * 100)
    (results / "wandb").write_text("where its folder would be")
    for name, title in (("mlflow", "MLflow"), ("wandb", "W&B")):
        assert main(["results", "import", "--tracking", name, "--results", str(results)]) == 1
        said = capsys.readouterr()
        assert said.out.splitlines()[-1] == f"logged 0 runs to {name}"
        assert said.err.count(f"warning: {title} is off") == 1


def test_neither_is_loaded_before_it_is_used() -> None:
    code = "import sys, harness.viewers.trackers as t; t.check_installed(['mlflow']); "
    code += "print([name for name in ('mlflow', 'wandb', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
