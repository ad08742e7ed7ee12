"""The owner of a connection to MLflow: logs cells one at a time, and the arms of a sweep once its cells are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from harness.records.run_result import RunResult, read_series
from harness.viewers.mlflow import entities
from harness.viewers.mlflow.store import KEY, connect, experiment_of, logged, outages

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

STATUS = {"ok": "FINISHED", "diverged": "FAILED", "failed": "FAILED", "cancelled": "KILLED", "skipped": "KILLED"}
BATCH = 800
"""Metrics per request; MLflow takes 1000 entities, and the first request carries parameters too."""


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

    def log_cell(
        self,
        sweep: str,
        result: RunResult,
        folder: Path,
        *,
        label: str | None = None,
        tags: Mapping[str, str] | None = None,
        samples: Sequence[Metric] = (),
    ) -> int:
        """Log the result of `<folder>/<run_id>.json` under its arm, in some 0.2 s: 1, or 0 where it was there.

        `label` names the arm where it is known, `tags` are added (a search's trial), `samples` are system metrics taken
        while the cell ran. An outage warns and returns 0, and so does a series that cannot be read.
        """
        if self.client is None:
            return 0
        try:
            return self._log_cell(self.client, sweep, result, folder, label, dict(tags or {}), samples)
        except ValueError as error:
            print(f"warning: left alone: {error}", file=sys.stderr)
        except outages() as error:
            self.give_up(error)
        return 0

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
        place, key = self.place(sweep), f"{sweep}:{entities.arm_key(result)}"
        if key not in place.known:
            name = label or entities.plain_name(result)
            tags = {"kind": "arm", "lowbit.sweep": sweep, KEY: key, "arm": name} | entities.setting_tags(result)
            start = entities.milliseconds(result.started_at)
            run = self.client.create_run(place.experiment_id, start_time=start, tags=tags, run_name=name)
            place.known[key] = run.info.run_id
        return place.known[key]

    def give_up(self, error: BaseException) -> None:
        """Be silent from here on, after one warning."""
        self.client = None
        reason = " ".join(str(error).split())[:160]
        print(f"warning: MLflow is off, runs go on: {reason} (later: lowbit results import)", file=sys.stderr)

    def _log_cell(
        self, client: MlflowClient, sweep: str, result: RunResult, folder: Path,
        label: str | None, tags: dict[str, str], samples: Sequence[Metric],
    ) -> int:  # fmt: skip
        path, place = folder / f"{result.run_id}.json", self.place(sweep)
        key = cell_key(sweep, path)
        if key in place.known:
            return 0
        for old in [old for old in place.known if old.startswith(f"{sweep}/{result.run_id}@")]:
            client.delete_run(place.known.pop(old))
        name = label or entities.plain_name(result)
        tags = entities.cell_tags(sweep, result) | {"arm": name} | tags
        tags["mlflow.parentRunId"] = self.arm(sweep, result, label)
        tags["system_metrics"] = entities.LIVE if samples else entities.REBUILT
        start, end = (entities.milliseconds(stamp) for stamp in (result.started_at, result.ended_at))
        name = f"{name}, seed {result.seed}"
        run_id = client.create_run(place.experiment_id, start_time=start, tags=tags, run_name=name).info.run_id
        self._log_values(client, place, run_id, result, path, samples)
        client.set_tag(run_id, KEY, key)  # last: what an outage cuts short is not taken for complete
        client.set_terminated(run_id, STATUS[result.status], end)
        place.known[key] = run_id
        return 1

    def _log_values(
        self,
        client: MlflowClient,
        place: Experiment,
        run_id: str,
        result: RunResult,
        path: Path,
        samples: Sequence[Metric],
    ) -> None:
        from mlflow.entities import DatasetInput, InputTag, LoggedModelInput

        parquet = path.with_suffix(".parquet")
        series = read_series(path.parent, result.run_id) if parquet.exists() else {}
        metrics = [*entities.cell_metrics(result, series), *samples]
        client.log_batch(run_id, metrics=metrics[:BATCH], params=entities.cell_params(result))
        for first in range(BATCH, len(metrics), BATCH):
            client.log_batch(run_id, metrics=metrics[first : first + BATCH])
        for file in filter(Path.exists, (path, parquet)):
            client.log_artifact(run_id, str(file))
        if result.passport is not None:
            client.log_dict(run_id, result.passport, "passport.json")
        data, model = entities.data_set(result), self._model(client, place, result)
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


def cell_key(sweep: str, path: Path) -> str:
    """The tag of a cell that is logged completely: its file and the content of that."""
    return f"{sweep}/{path.stem}@{crc32(path.read_bytes()):08x}"


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among `values`."""
    found = {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {name: value for name, value in found.items() if abs(value) < float("inf")}
