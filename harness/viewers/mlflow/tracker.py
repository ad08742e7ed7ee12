"""The owner of a connection to MLflow: logs cells one at a time, and the arms of a sweep once its cells are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.records.run_result import RunResult
from harness.viewers.mlflow.store import KEY, connect, experiment_of, logged, outages
from harness.viewers.tracking import facts
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import Cell, warn_off

if TYPE_CHECKING:
    from mlflow.entities import Dataset
    from mlflow.tracking import MlflowClient

STATUS = {"ok": "FINISHED", "diverged": "FAILED", "failed": "FAILED", "cancelled": "KILLED", "skipped": "KILLED"}
BATCH = 1000
"""Metrics per request, the most that MLflow takes."""
PARAMS = 100
"""Parameters per request, likewise."""
MAX_POINTS = 20
"""Steps of a curve that are logged, evenly spaced and with the last; extremes are in `summary/`. A point costs MLflow
0.3 ms and 250 bytes, and a rebuild logs them all."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A sweep's experiment and what is in it."""

    experiment_id: str
    known: dict[str, str]
    """KEY -> MLflow run id."""
    models: dict[str, str] = field(default_factory=dict[str, str])
    """Content hash of a base -> MLflow's logged model, those of this session."""


class Tracker:
    """Owns the connection to MLflow. After the first error it does nothing and says so once."""

    name = "MLflow"
    max_points: int | None = MAX_POINTS

    def __init__(self, client: MlflowClient | None, root: str | None = None) -> None:
        self.client = client
        self.root = root
        self.places: dict[str, Experiment] = {}

    @classmethod
    def open(cls, uri: str | None = None, results: Path = Path("results")) -> Tracker:
        """Connect to `uri`, else to MLFLOW_TRACKING_URI, else to the SQLite file of `results`; an outage only warns."""
        try:
            client, root = connect(uri, results)
            client.search_experiments(max_results=1)
            return cls(client, root)
        except outages() as error:
            tracker = cls(None)
            tracker.give_up(error)
            return tracker

    @property
    def is_on(self) -> bool:
        """Is there a connection?"""
        return self.client is not None

    def place(self, sweep: str) -> Experiment:
        """The experiment of a sweep, made or looked up once."""
        assert self.client is not None
        if sweep not in self.places:
            experiment = experiment_of(self.client, sweep, self.root)
            self.places[sweep] = Experiment(experiment_id=experiment, known=logged(self.client, experiment))
        return self.places[sweep]

    def arm(self, sweep: str, result: RunResult, label: str | None) -> str:
        """The run of a result's arm, made under a provisional name where the label is not known yet."""
        assert self.client is not None
        place, key = self.place(sweep), f"{sweep}:{facts.arm_key(result)}"
        if key not in place.known:
            name = label or facts.plain_name(result)
            tags = {"kind": "arm", "lowbit.sweep": sweep, KEY: key, "arm": name} | facts.setting_tags(result)
            start = facts.milliseconds(result.started_at)
            run = self.client.create_run(place.experiment_id, start_time=start, tags=tags, run_name=name)
            place.known[key] = run.info.run_id
        return place.known[key]

    def start(self, cell: Cell) -> MLflowRun | None:
        """Open a run for a cell under that of its arm; None where it is logged already."""
        client, place = self.client, self.place(cell.sweep)
        assert client is not None
        if cell.key in place.known:
            return None
        for old in [old for old in place.known if old.startswith(f"{cell.sweep}/{cell.result.run_id}@")]:
            client.delete_run(place.known.pop(old))
        tags = {**cell.tags, "mlflow.parentRunId": self.arm(cell.sweep, cell.result, cell.arm)}
        name = f"{cell.arm}, seed {cell.result.seed}"
        run_id = client.create_run(place.experiment_id, start_time=cell.start_ms, tags=tags, run_name=name).info.run_id
        self._log_inputs(client, place, run_id, cell.result)
        return MLflowRun(client, place, run_id, cell)

    def outages(self) -> tuple[type[Exception], ...]:
        """Errors that a store raises when it is down, full, locked or broken."""
        return outages()

    def give_up(self, error: BaseException) -> None:
        """Be silent from here on, after one warning."""
        self.client = None
        warn_off(self.name, error)

    def close(self) -> None:
        """Nothing is held open between two requests."""

    def _log_inputs(self, client: MlflowClient, place: Experiment, run_id: str, result: RunResult) -> None:
        """Log what other trackers have no word for: the passport, the data set and the base model."""
        from mlflow.entities import DatasetInput, InputTag, LoggedModelInput

        if result.passport is not None:
            client.log_dict(run_id, result.passport, "passport.json")
        data, model = data_set(result), self._model(client, place, result)
        inputs = [] if data is None else [DatasetInput(data, [InputTag("mlflow.data.context", "training")])]
        client.log_inputs(run_id, inputs, None if model is None else [LoggedModelInput(model)])

    def _model(self, client: MlflowClient, place: Experiment, result: RunResult) -> str | None:
        """The base that the run started from, as a logged model: one per content hash."""
        digest = result.hashes.get("model")
        if not digest:
            return None
        if digest not in place.models:
            for model in client.search_logged_models([place.experiment_id]):
                place.models[model.tags.get("model_hash", "")] = model.model_id
        if digest not in place.models:
            name = f"{result.config.get('model', {}).get('name')}-base{result.base_seed}"
            model = client.create_logged_model(place.experiment_id, name, tags={"model_hash": digest})
            client.finalize_logged_model(model.model_id, "READY")
            place.models[digest] = model.model_id
        return place.models[digest]


class MLflowRun:
    """A run that is open in MLflow."""

    def __init__(self, client: MlflowClient, place: Experiment, run_id: str, cell: Cell) -> None:
        self.client, self.place, self.run_id, self.cell = client, place, run_id, cell

    def params(self, values: Mapping[str, str]) -> None:
        """Log parameters."""
        log_params(self.client, self.run_id, values)

    def series(self, points: Sequence[Point], axis: str = "step") -> None:
        """Log numbers by step."""
        log_points(self.client, self.run_id, points)

    def artifact(self, path: Path) -> None:
        """Copy a file into the store."""
        self.client.log_artifact(self.run_id, str(path))

    def end(self) -> None:
        """Give the run its key and end it."""
        cell = self.cell
        self.client.set_tag(self.run_id, KEY, cell.key)  # last: what an outage cuts short is not taken for complete
        self.client.set_terminated(self.run_id, STATUS[cell.result.status], cell.end_ms)
        self.place.known[cell.key] = self.run_id


def log_params(client: MlflowClient, run_id: str, values: Mapping[str, str]) -> None:
    """Log parameters, as many a request as MLflow takes; the characters that it takes of each."""
    from mlflow.entities import Param

    params = [Param(name, value[:6000]) for name, value in values.items()]
    for first in range(0, len(params), PARAMS):
        client.log_batch(run_id, params=params[first : first + PARAMS])


def log_points(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    """Log numbers, as many a request as MLflow takes."""
    from mlflow.entities import Metric

    for first in range(0, len(points), BATCH):
        client.log_batch(run_id, metrics=[Metric(*point) for point in points[first : first + BATCH]])


def data_set(result: RunResult) -> Dataset | None:
    """The task as MLflow's data set: its digest is the content hash, its profile says which questions were scored."""
    from mlflow.entities import Dataset

    digest, task = result.hashes.get("task"), result.config.get("task", {})
    if not digest:
        return None
    name = f"{task.get('name')}" + (f" n={task['n']}" if task.get("n") is not None else "")
    profile = {"question_hash": facts.questions_of(result), "num_eval": task.get("num_eval")}
    return Dataset(name, digest[:36], "task", json.dumps({"task": task}), profile=json.dumps(profile))
