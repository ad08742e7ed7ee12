"""Shared pieces of the tracking tests: a small sweep on disk, a store to log it to, and a look at what is there."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

from harness.records.run_result import write_result
from harness.viewers import mlflow
from tests import result_factory as factory

STEPS: dict[str, Any] = {"trainer__steps": 50, "trainer__eval_every": 25}
ARMS = (("bf16", "bf16"), ("naive", "int4"), ("flashrl", "int4"))


def new_results(folder: Path, empty_store: Path, seeds: int = 2) -> Path:
    """Three arms, a table and a figure, and a store without runs."""
    for method, precision in ARMS:
        for seed in range(seeds):
            add(folder, method, precision, seed=seed)
    for path in (folder / "tables" / "quick.md", folder / "figures" / "quick" / "overview.png"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    (folder / "mlflow").mkdir()
    shutil.copy(empty_store, folder / "mlflow")
    return folder


def add(folder: Path, method: str = "bf16", precision: str = "bf16", **values: Any) -> Any:
    result, series = factory.result(method, precision, **STEPS, **values)
    result = result.model_copy(update={"passport": {"engine": "embedded", "weights": []}})
    write_result(folder / "runs" / "quick", result, series)
    return result


def connection(results: Path) -> tuple[Any, Any]:
    """(client, the experiment of the sweep)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(mlflow.store_uri(results))
    experiment = client.get_experiment_by_name("lowbit/quick")
    assert experiment is not None
    return client, experiment


def runs(results: Path, words: str = "") -> dict[str, list]:
    """Runs by name."""
    client, experiment = connection(results)
    found: dict[str, list] = {}
    for run in client.search_runs([experiment.experiment_id], words):
        found.setdefault(run.info.run_name or "", []).append(run)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
