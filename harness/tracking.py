"""MLflow as a view of the results: a parent run per sweep, a child per cell. The only import of mlflow.

Everything here is rebuilt from the result files (`lowbit results import`), so an outage costs one warning and no run.
By default the store is SQLite at `<results>/mlflow.db` with artifacts under `<results>/mlruns`; MLFLOW_TRACKING_URI
names another server. A child is logged once per content of its result file, found again by its tags.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from harness.arms import arm_labels, flatten
from harness.results import RunResult, read_results, read_series

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

EXPERIMENT = "lowbit"
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Nothing is sent anywhere but to the store, and a server that is down is given up quickly."""
SCALARS = ("reward/", "train/", "correction/", "rollout/", "sync/", "part/")
"""Groups logged whole; of the others only what CHOSEN names. All columns are in the Parquet artifact."""
CHOSEN = {"time/generate_s", "time/update_s"} | {
    f"mismatch/{name}"
    for name in (
        "kl_k1", "kl_k3", "logp_absdiff_mean", "logp_absdiff_max", "ess_token", "ess_token_raw", "prob_pearson",
        "chi2_token", "log_ppl_diff", "mult_prob_error",
    )
}  # fmt: skip
STATUS = {"ok": "FINISHED", "diverged": "FAILED", "failed": "FAILED", "cancelled": "KILLED", "skipped": "KILLED"}
BATCH = 1000
"""Metrics per request, MLflow's own limit."""


class Tracker:
    """Owns the connection to MLflow. After the first error it does nothing and says so once."""

    def __init__(
        self, client: MlflowClient | None, experiment_id: str = "", known: Mapping[str, str] | None = None
    ) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.known = dict(known or {})
        """Tag "sweep/run_id@digest" -> MLflow run id; the digest is empty until all is logged. Parents: "sweep"."""

    @classmethod
    def open(cls, uri: str | None, experiment: str = EXPERIMENT, results: Path = Path("results")) -> Tracker:
        """Connect to `uri`, else to MLFLOW_TRACKING_URI, else to the SQLite file of `results`; an outage only warns."""
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or store_uri(results)
        try:
            client = _client(uri, results)
            found = client.get_experiment_by_name(experiment)
            location = None if uri.startswith("http") else (results / "mlruns").absolute().as_uri()
            experiment_id = found.experiment_id if found else client.create_experiment(experiment, location)
            return cls(client, experiment_id, _logged(client, experiment_id))
        except _outages() as error:
            tracker = cls(None)
            tracker._give_up(error)
            return tracker

    def log_sweep(
        self, sweep: str, results: Sequence[RunResult], folder: Path, artifacts: Mapping[str, Sequence[Path]]
    ) -> int:
        """Log every result of `<folder>/<run_id>.json` that is not there yet under the sweep's parent: how many.

        `artifacts` (artifact folder -> files: tables, figures) go to the parent, new ones in place of old ones.
        """
        labels, num_logged = arm_labels(results), 0
        try:
            for result in results:
                num_logged += self._log_result(sweep, result, labels[result.run_id], folder)
            files = [(name, path) for name, paths in artifacts.items() for path in paths]
            for name, path in files if self.client is not None else ():
                self._log_artifact(sweep, path, name)
        except _outages() as error:
            self._give_up(error)
        return num_logged

    def _log_result(self, sweep: str, result: RunResult, label: str, folder: Path) -> int:
        """One child run; the tag that marks it complete comes last. 1 where it was logged, 0 where it was there."""
        path = folder / f"{result.run_id}.json"
        name = f"{sweep}/{result.run_id}"
        key = f"{name}@{crc32(path.read_bytes()):08x}"
        if self.client is None or key in self.known:
            return 0
        for old in [old for old in self.known if old.startswith(f"{name}@")]:
            self.client.delete_run(self.known.pop(old))
        parent = self._parent(self.client, sweep)
        start, end = _milliseconds(result.started_at), _milliseconds(result.ended_at)
        tags = {
            "mlflow.parentRunId": parent, "lowbit.sweep": sweep, "lowbit.run_id": result.run_id, "arm": label,
            "method": result.method.name, "precision": str(flatten(result.config).get("precision.name")),
            "status": result.status, "reason": result.reason or "", "commit": result.commit or "",
            "is_draft": str(result.is_draft).lower(),
        }  # fmt: skip
        run_id = self.client.create_run(
            self.experiment_id, start_time=start, tags=tags, run_name=result.name
        ).info.run_id
        self._log_values(run_id, result, folder, start or 0, end or 0)
        self.client.log_artifact(run_id, str(path))
        if result.passport is not None:
            self.client.log_dict(run_id, result.passport, "passport.json")
        self.client.set_tag(run_id, "lowbit.key", key)
        self.client.set_terminated(run_id, STATUS[result.status], end)
        self.known[key] = run_id
        return 1

    def _log_values(self, run_id: str, result: RunResult, folder: Path, start: int, end: int) -> None:
        from mlflow.entities import Metric, Param

        assert self.client is not None
        params = [Param(name, str(value)[:6000]) for name, value in flatten(result.config).items()]
        metrics = [Metric(f"summary/{name}", v, end, 0) for name, v in result.summary.items() if v is not None]
        for record in result.evals:
            if record.accuracy is not None:
                metrics.append(Metric(f"eval/accuracy_{record.site}", record.accuracy, end, record.step))
        series = folder / f"{result.run_id}.parquet"
        if series.exists():
            metrics += _series_metrics(read_series(folder, result.run_id), start, end)
            self.client.log_artifact(run_id, str(series))
        for first in range(0, len(params), 100):
            self.client.log_batch(run_id, params=params[first : first + 100])
        for first in range(0, len(metrics), BATCH):
            self.client.log_batch(run_id, metrics=metrics[first : first + BATCH])

    def _log_artifact(self, sweep: str, path: Path, name: str) -> None:
        assert self.client is not None
        self.client.log_artifact(self._parent(self.client, sweep), str(path), name)

    def _parent(self, client: MlflowClient, sweep: str) -> str:
        if sweep not in self.known:
            tags = {"lowbit.sweep": sweep, "lowbit.key": sweep}
            run_id = client.create_run(self.experiment_id, tags=tags, run_name=sweep).info.run_id
            client.set_terminated(run_id)
            self.known[sweep] = run_id
        return self.known[sweep]

    def _give_up(self, error: BaseException) -> None:
        self.client = None
        reason = " ".join(str(error).split())[:160]
        print(f"warning: MLflow is off, runs go on: {reason} (later: lowbit results import)", file=sys.stderr)


def track(results: Path, sweep: str, uri: str | None = None) -> int:
    """Log one sweep of a results folder, with its tables and figures on the parent: how many runs were new."""
    return _log_folder(Tracker.open(uri, results=results), results, sweep)


def rebuild(results: Path, uri: str | None = None) -> int:
    """Log every sweep of a results folder that MLflow does not have: how many runs were new."""
    tracker = Tracker.open(uri, results=results)
    folders = [folder for folder in sorted((results / "runs").glob("*")) if folder.is_dir()]
    return sum(_log_folder(tracker, results, folder.name) for folder in folders)


def _log_folder(tracker: Tracker, results: Path, sweep: str) -> int:
    folder = results / "runs" / sweep
    tables = [path for name in (f"{sweep}.md", f"{sweep}.csv") if (path := results / "tables" / name).exists()]
    figures = sorted((results / "figures" / sweep).glob("*.png"))
    return tracker.log_sweep(sweep, read_results(folder), folder, {"tables": tables, "figures": figures})


def browse(results: Path, port: int) -> int:
    """Serve the MLflow UI of a results folder on this machine until interrupted; the server's exit code.

    Raises ValueError where the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} cannot be used: {reason}; choose another with --port") from error
    if not (results / "mlflow.db").exists():
        rebuild(results)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store_uri(results)]
    command += ["--default-artifact-root", (results / "mlruns").absolute().as_uri()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    print(f"MLflow of {results}: http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    with subprocess.Popen(command, env={**os.environ, **QUIET}) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            return 0


def store_uri(results: Path) -> str:
    """The SQLite store of a results folder."""
    return f"sqlite:///{(results / 'mlflow.db').absolute()}"


def _client(uri: str, results: Path) -> MlflowClient:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    if uri.startswith("sqlite:"):
        results.mkdir(parents=True, exist_ok=True)
    return MlflowClient(uri)


def _outages() -> tuple[type[Exception], ...]:
    """What a store that is down, full, locked or broken raises."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def _logged(client: MlflowClient, experiment_id: str) -> dict[str, str]:
    """Key -> MLflow run. A child that an outage cut short has no digest in its key, so it is replaced."""
    known: dict[str, str] = {}
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], "tags.`lowbit.sweep` != ''", max_results=1000, page_token=token)
        for run in page:
            tags = run.data.tags
            known[tags.get("lowbit.key", f"{tags['lowbit.sweep']}/{tags.get('lowbit.run_id')}@")] = run.info.run_id
        token = page.token
        if not token:
            return known


def _series_metrics(series: Mapping[str, Sequence[Any]], start: int, end: int) -> list[Metric]:
    """The chosen columns, their steps counted from 1 and spread evenly over the time of the run; NaN is left out."""
    from mlflow.entities import Metric

    return [
        Metric(name, float(value), start + (end - start) * step // len(values), step)
        for name, values in series.items()
        if name.startswith(SCALARS) or name in CHOSEN
        for step, value in enumerate(values, 1)
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


def _milliseconds(stamp: str | None) -> int | None:
    return None if stamp is None else int(datetime.fromisoformat(stamp).timestamp() * 1000)
