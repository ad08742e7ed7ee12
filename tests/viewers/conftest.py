"""A store with nothing in it, and a small sweep that is logged to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.viewers import mlflow, trackers
from tests.viewers.cases import new_results


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in mlflow.QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables and nothing in them: making them takes seconds, copying them none."""
    folder = tmp_path_factory.mktemp("empty")
    assert mlflow.Tracker.open(results=folder).client is not None
    return folder / "mlflow" / "mlflow.db"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """Logged once."""
    folder = new_results(tmp_path_factory.mktemp("results"), empty_store)
    assert trackers.track(folder, "quick", ("mlflow",)) == 6
    return folder
