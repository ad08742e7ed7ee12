"""The connection: where the store is, what an outage raises, the experiment of a sweep, and what is logged there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.foundation.lock_file import held
from harness.records.paths import mlflow_folder

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

PREFIX = "lowbit/"
"""An experiment is named `lowbit/<sweep>`: a shared server keeps ours together."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Nothing is sent anywhere but to the store, and a server that is down is given up quickly."""
KEY = "lowbit.key"
"""The tag that finds a run again: `sweep` of the overview, `sweep:setting` of an arm, `sweep/run_id@digest` of a cell
of which everything is logged."""

UNFINISHED = "unfinished-"
"""Start of the name of a folder in which a store is being made."""


def store_uri(results: Path) -> str:
    """The SQLite store of a results folder."""
    return f"sqlite:///{(mlflow_folder(results) / 'mlflow.db').absolute()}"


def artifact_root(results: Path) -> str:
    """Folder in which that store keeps files."""
    return (mlflow_folder(results) / "artifacts").absolute().as_uri()


def connect(uri: str | None, results: Path) -> tuple[MlflowClient, str | None]:
    """(client, artifact root where we set it): `uri`, else MLFLOW_TRACKING_URI, else the SQLite file of `results`."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import logging

    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or store_uri(results)
    if uri.startswith("sqlite:"):
        mlflow_folder(results).mkdir(parents=True, exist_ok=True)
    if uri == store_uri(results):
        _make_store(results)
    return MlflowClient(uri), None if uri.startswith("http") else artifact_root(results)


def _make_store(results: Path) -> None:
    """Make the SQLite file of a results folder beside its place, where it is missing: MLflow never mends one whose
    making a kill has cut short."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path = mlflow_folder(results) / "mlflow.db"
    if path.exists():
        return
    with held(path.with_name("mlflow.db.lock")):
        if path.exists():
            return
        for old in path.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(old, ignore_errors=True)
        # a new name each time: MLflow keeps connections by the name of the file
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as folder:
            part = Path(folder).absolute() / path.name
            SqlAlchemyStore(f"sqlite:///{part}", artifact_root(results)).engine.dispose()
            part.rename(path)


def outages() -> tuple[type[Exception], ...]:
    """Errors that a store raises when it is down, full, locked or broken."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def experiment_of(client: MlflowClient, sweep: str, root: str | None) -> str:
    """The id of a sweep's experiment, made where it is missing."""
    found = client.get_experiment_by_name(PREFIX + sweep)
    if found is not None:
        return found.experiment_id
    location = None if root is None else f"{root}/{sweep}"
    return client.create_experiment(PREFIX + sweep, location, {"mlflow.experimentKind": "custom_model_development"})


def runs_of(client: MlflowClient, experiment_id: str, condition: str) -> Iterator[Run]:
    """Every run of an experiment that meets an MLflow filter, page by page."""
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], condition, max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def logged(client: MlflowClient, experiment_id: str) -> dict[str, str]:
    """Key -> MLflow run. A child that an outage cut short has no digest in its key, so it is replaced."""
    known: dict[str, str] = {}
    for run in runs_of(client, experiment_id, "tags.`lowbit.sweep` != ''"):
        tags = run.data.tags
        known[tags.get(KEY, f"{tags['lowbit.sweep']}/{tags.get('lowbit.run_id')}@")] = run.info.run_id
    return known
