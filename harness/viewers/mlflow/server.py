"""`lowbit browse`: MLflow's pages over a results folder, on this machine alone, opened at the right view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from harness.foundation.did_you_mean import nearest
from harness.foundation.local_port import check_port
from harness.foundation.own_process import module_command
from harness.foundation.progress_bar import progress_bar
from harness.foundation.whole_file import write_atomic
from harness.foundation.writable import check_writable
from harness.records.folder import Comparison, readable, saved_comparisons, sweeps_in
from harness.records.looks import level_of
from harness.records.paths import mlflow_folder, runs_folder
from harness.records.sweep_file import purpose
from harness.viewers.mlflow import links
from harness.viewers.mlflow.rebuild import log_arms, log_sweep
from harness.viewers.mlflow.store import PREFIX, QUIET, artifact_root, store_uri
from harness.viewers.mlflow.tracker import Tracker

START_S = 90.0
"""Seconds that the server has to answer."""


def browse(results: Path, port: int, sweep: str | None = None, words: Sequence[str] = ()) -> int:
    """Serve the MLflow pages of a results folder on this machine until interrupted; the server's exit code.

    What MLflow lacks (of one sweep, where named) is logged: arms before the server starts, cells while it runs. `words`
    choose a saved comparison of the sweep. Raises ValueError where the port is taken, a name is unknown or nothing can
    be written.
    """
    check_port(port)
    known = sweeps_in(results)
    if sweep is not None and sweep not in known:
        raise ValueError(f"sweep {sweep!r} has no results in {results}; {nearest(sweep, known)}")
    chosen = _chosen(results, sweep, words) if words else None
    check_writable(mlflow_folder(results), "--results")
    tracker, wanted = Tracker.open(store_uri(results), results), [sweep] if sweep else known
    for name in progress_bar(wanted, "sweep"):
        log_arms(tracker, results, name)
    command = module_command("mlflow", "server", "--backend-store-uri", store_uri(results))
    command += ["--default-artifact-root", artifact_root(results)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    address = f"http://127.0.0.1:{port}"
    print(f"MLflow of {results} starts at {address} (Ctrl-C ends it)", flush=True)
    environment = {**os.environ, **QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as server:
        try:
            _wait_for(server, address)
            _say(tracker, address, sweep, wanted, chosen)
            _write_links(tracker, results, address, known)
            for name in wanted:
                log_sweep(tracker, results, name)
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()


def _chosen(results: Path, sweep: str | None, words: Sequence[str]) -> Comparison:
    """The first saved comparison whose title has every word."""
    if sweep is None:
        raise ValueError("--compare needs a sweep: lowbit browse SWEEP --compare qurl flashrl int8")
    from harness.report.leaderboard import leaderboard

    runs, _ = readable(runs_folder(results, sweep))
    aim = purpose(sweep, results)
    board = leaderboard(runs, aim.control, aim.endpoints, level_of(results, sweep))
    saved = saved_comparisons(board.to_dict("records"), aim.baselines)
    for comparison in sorted(saved, key=lambda c: len(c.title)):
        if set(words) <= set(comparison.title.replace(",", "").split()):
            return comparison
    titles = "; ".join(comparison.title for comparison in saved[:6])
    raise ValueError(f"--compare {' '.join(words)}: no such comparison in {sweep}; valid: {titles} ...")


def _wait_for(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(f"{address}/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.2)


def _say(tracker: Tracker, address: str, sweep: str | None, wanted: Sequence[str], chosen: Comparison | None) -> None:
    """The address of every sweep's arms; of the one comparison that was asked for, where one was."""
    if tracker.client is None:
        return
    for name in wanted:
        place = tracker.places.get(name)
        if place is not None:
            view = "All arms" if chosen is None else chosen.title
            page = links.view_page(place.experiment_id, links.view_key(view))
            print(f"{name}: {view}\n    {address}/{page}", flush=True)
    if sweep is None:
        print(f"all sweeps\n    {address}/#/experiments", flush=True)


def _write_links(tracker: Tracker, results: Path, address: str, sweeps: Sequence[str]) -> None:
    """Write the links by which the site finds MLflow on this machine: `<results>/mlflow/links.js`, which is not
    committed."""
    if tracker.client is None:
        return
    ids = {name: found.experiment_id for name in sweeps
           if (found := tracker.client.get_experiment_by_name(PREFIX + name)) is not None}  # fmt: skip
    text = f"window.LOWBIT_MLFLOW = {json.dumps({'address': address, 'experiments': ids})};\n"
    write_atomic(mlflow_folder(results) / "links.js", text.encode())
