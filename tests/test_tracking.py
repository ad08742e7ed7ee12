"""MLflow as a view: complete, logged once, replaced where a result changed, and never in the way of a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness import tracking
from harness.results import write_result
from tests import result_factory as factory

STEPS: dict[str, Any] = {"trainer__steps": 6, "trainer__eval_every": 3}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in tracking.QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms, one seed each, a table and a figure, logged once."""
    folder = tmp_path_factory.mktemp("results")
    for method, precision in (("bf16", "bf16"), ("naive", "int4")):
        result, series = factory.result(method, precision, **STEPS)
        passport = {"engine": "embedded", "weights": []}
        write_result(folder / "runs" / "quick", result.model_copy(update={"passport": passport}), series)
    for path in (folder / "tables" / "quick.md", folder / "figures" / "quick" / "overview.png"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    assert tracking.track(folder, "quick") == 2
    return folder


def runs(results: Path) -> dict[str, list]:
    """Runs by name; a parent has its sweep's name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking.store_uri(results))
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    found: dict[str, list] = {}
    for run in client.search_runs([experiment.experiment_id]):
        found.setdefault(run.info.run_name or "", []).append(run)
    return found


def test_what_is_logged(results: Path) -> None:
    from mlflow.tracking import MlflowClient

    result, series = factory.result("naive", "int4", **STEPS)
    found = runs(results)
    assert sorted(found) == ["bf16-bf16-decoupled-s0", "naive-int4-decoupled-s0", "quick"]
    (child,), (parent,) = found[result.name], found["quick"]
    tags, params, metrics = child.data.tags, child.data.params, child.data.metrics
    assert tags["mlflow.parentRunId"] == parent.info.run_id
    assert (tags["arm"], tags["method"], tags["precision"], tags["status"]) == ("naive int4", "naive", "int4", "ok")
    assert tags["commit"] == result.commit and tags["lowbit.run_id"] == result.run_id
    assert (params["precision.name"], params["trainer.steps"], params["task.n"]) == ("int4", "6", "8")
    assert metrics["summary/auc"] == pytest.approx(result.summary["auc"])
    assert metrics["mismatch/kl_k3"] == pytest.approx(series[-1]["mismatch/kl_k3"])
    assert child.info.status == "FINISHED" and child.info.end_time - child.info.start_time == 19_000
    client = MlflowClient(tracking.store_uri(results))
    history = client.get_metric_history(child.info.run_id, "reward/mean")
    assert [m.value for m in history] == pytest.approx([row["reward/mean"] for row in series])
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6]
    evals = client.get_metric_history(child.info.run_id, "eval/accuracy_rollout")
    assert {m.step: m.value for m in evals} == {r.step: r.accuracy for r in result.evals if r.site == "rollout"}
    names = {file.path for file in client.list_artifacts(child.info.run_id)}
    assert names == {f"{result.run_id}.json", f"{result.run_id}.parquet", "passport.json"}
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "figures")] == ["figures/overview.png"]
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "tables")] == ["tables/quick.md"]


def test_again_changes_nothing_and_a_new_result_replaces_the_old(results: Path) -> None:
    assert tracking.rebuild(results) == 0
    before = runs(results)
    lost, _ = factory.result(seed=1, status="failed", **STEPS)
    path = write_result(results / "runs" / "quick", lost, None)
    assert tracking.track(results, "quick") == 1
    assert runs(results)[lost.name][0].info.status == "FAILED"
    won, series = factory.result(seed=1, **STEPS)
    assert write_result(results / "runs" / "quick", won, series) == path
    assert tracking.rebuild(results) == 1
    after = runs(results)
    assert [run.info.status for run in after[won.name]] == ["FINISHED"]
    for name, (run,) in before.items():
        assert [other.info.run_id for other in after[name]] == [run.info.run_id]


def test_an_outage_in_the_middle_warns_once_and_is_made_up_for(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    for seed in (2, 3):
        result, series = factory.result(seed=seed, **STEPS)
        write_result(results / "runs" / "quick", result, series)

    def down(*_args: object, **_kwargs: object) -> None:
        raise MlflowException("the disk is\nfull")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", down)
        assert tracking.track(results, "quick") == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: MLflow is off, runs go on: the disk is full (later: lowbit results import)"]
    assert tracking.rebuild(results) == 2
    assert {name: len(found) for name, found in runs(results).items() if name.endswith(("s2", "s3"))} == {
        "bf16-bf16-decoupled-s2": 1,
        "bf16-bf16-decoupled-s3": 1,
    }


def test_a_store_that_is_not_there_only_warns(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    result, series = factory.result(**STEPS)
    write_result(tmp_path / "runs" / "quick", result, series)
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    for uri in (None, f"http://127.0.0.1:{port}", "nonsense://x"):
        assert tracking.track(tmp_path, "quick", uri) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: MLflow is off, runs go on: ")
    assert time.perf_counter() - began < 15


def test_a_taken_port_is_an_error_in_words(results: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used: Address already in use"):
            tracking.browse(results, port)
    with pytest.raises(ValueError, match="port 70000 cannot be used"):
        tracking.browse(results, 70000)


def test_browse_serves_the_results(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The server itself takes long to start, so its command line is looked at in its place."""
    started: list[list[str]] = []

    class Server:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.append(command)
            assert env["MLFLOW_DISABLE_TELEMETRY"] == "true" and env["PATH"] == os.environ["PATH"]

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_details: object) -> None: ...

        def wait(self) -> int:
            return 3

    monkeypatch.setattr(tracking.subprocess, "Popen", Server)
    assert tracking.browse(results, 5999) == 3
    assert started[0][:4] == [sys.executable, "-m", "mlflow", "server"]
    assert started[0][started[0].index("--backend-store-uri") + 1] == f"sqlite:///{results / 'mlflow.db'}"
    assert "http://127.0.0.1:5999" in capfd.readouterr().out


def test_mlflow_is_loaded_only_when_used() -> None:
    code = "import sys, harness.tracking; print([m for m in ('mlflow', 'torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
