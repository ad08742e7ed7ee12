"""`lowbit browse`: the right view, on a free port, from a server that answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from harness.cli.main import main
from harness.records.packed import pack
from harness.records.run_result import read_results, write_result
from harness.report.leaderboard import leaderboard
from harness.viewers import mlflow
from harness.viewers.mlflow import links, server
from tests.result_factory import result
from tests.source_tree import ROOT
from tests.viewers.cases import free_port


def test_a_taken_port_or_an_unknown_name_is_an_error_in_words(results: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used: Address already in use"):
            mlflow.browse(results, port)
    with pytest.raises(ValueError, match="port 70000 cannot be used"):
        mlflow.browse(results, 70000)
    port = free_port()
    with pytest.raises(ValueError, match=r"sweep 'quik' has no results .*quick"):
        mlflow.browse(results, port, "quik")
    with pytest.raises(ValueError, match="no such comparison in quick; valid: every arm"):
        mlflow.browse(results, port, "quick", ["qurl", "int8"])
    with pytest.raises(ValueError, match="--compare needs a sweep"):
        mlflow.browse(results, port, None, ["naive"])


def test_a_named_sweep_alone_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sweep in ("one", "two"):
        write_result(tmp_path / "runs" / sweep, *result(sweep=sweep))
        pack(tmp_path, sweep)
        shutil.rmtree(tmp_path / "runs" / sweep)
    monkeypatch.setattr(mlflow, "browse", lambda *given: 0)
    assert main(["browse", "one", "--results", str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]
    assert main(["browse", "--results", str(tmp_path)]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one", "two"]


def test_where_nothing_can_be_written_one_line_says_so(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "runs", tmp_path / "runs")
    (tmp_path / "mlflow").touch()
    with pytest.raises(ValueError, match=f"--results {tmp_path / 'mlflow'}: nothing can be written there: File exists"):
        mlflow.browse(tmp_path, free_port())


def test_a_failure_ends_the_server_too(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*given: Any) -> None:
        raise ValueError("no space")

    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(server, "module_command", lambda *words: [*asleep])
    monkeypatch.setattr(server, "_wait_for", lambda process, address: None)
    monkeypatch.setattr(server, "_write_links", no_space)
    started = time.monotonic()
    with pytest.raises(ValueError, match="no space"):
        mlflow.browse(results, free_port())
    assert time.monotonic() - started < 300


def test_browse_serves_the_view_that_was_asked_for(results: Path) -> None:
    """The real server: its page, and the runs that its API returns for the filter behind the printed link."""
    port = free_port()
    command = [sys.executable, "-m", "harness.cli.main", "browse", "quick", "--compare", "flashrl", "naive", "int4"]
    command += ["--results", str(results), "--port", str(port)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().strip() for _ in range(3)]
            address, _, page = lines[2].partition("/#/")
            key = links.view_key("flashrl against naive at int4")
            assert lines[1] == "quick: flashrl against naive at int4" and address == f"http://127.0.0.1:{port}"
            experiment = page.split("/")[1]
            assert f"runs?viewStateShareKey={key}" in page
            with urlopen(f"{address}/", timeout=60) as answer:
                assert b"<title>MLflow</title>" in answer.read()
            tags = ask(f"{address}/api/2.0/mlflow/experiments/get?experiment_id={experiment}")["experiment"]["tags"]
            view = json.loads(next(tag["value"] for tag in tags if tag["key"] == links.TAG + key))
            order = [f"{view['orderByKey']} DESC"]
            words = {"experiment_ids": [experiment], "filter": view["searchFilter"], "order_by": order}
            found = ask(f"{address}/api/2.0/mlflow/runs/search", words)["runs"]
            board = leaderboard(read_results(results / "runs" / "quick")).sort_values("auc", ascending=False)
            assert [run["info"]["run_name"] for run in found] == [a for a in board["arm"] if a.endswith("int4")]
        finally:
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    text = (results / "mlflow" / "links.js").read_text()
    assert json.loads(text.partition("= ")[2].rstrip(";\n"))["experiments"] == {"quick": experiment}


def ask(address: str, body: Any = None) -> Any:
    """An answer of the REST API."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(address, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


def test_a_server_that_dies_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as dead:
        began = time.monotonic()
        server._wait_for(dead, f"http://127.0.0.1:{free_port()}")
        assert time.monotonic() - began < 10
