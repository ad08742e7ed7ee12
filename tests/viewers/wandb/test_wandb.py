"""Weights & Biases without a network: its files hold the record's numbers, each cell once, and outages only warn."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.records.run_result import read_results
from harness.viewers import wandb as view
from harness.viewers.trackers import log_all, track
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import log_cell
from harness.viewers.wandb.tracker import QUIET
from tests import result_factory as factory
from tests.viewers.cases import STEPS, add

pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
BLOCK = 32768
"""Bytes of a block of W&B's log, which is LevelDB's; no record's header is cut by its end."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment as before each test: neither a mode nor a project, and what a tracker sets is taken back."""
    for name in (*QUIET, "WANDB_CACHE_DIR", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a header of 7 bytes, then checksum, size and kind before each piece."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009 - made at import, which pyright cannot see
    raw, at, whole = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        whole += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            record = new_record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def told(folder: Path) -> dict[str, Any]:
    """Contents of an offline run: its head, config, rows of the history, last summary, exit code and files."""
    (path,) = folder.glob("*.wandb")
    found: dict[str, Any] = {"config": {}, "rows": [], "summary": {}, "axes": {}}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            found["config"] |= _values(record.run.config.update)
        elif kind == "config":
            found["config"] |= _values(record.config.update)
        elif kind == "history":
            found["rows"].append(_values(record.history.item))
        elif kind == "summary":
            found["summary"] |= _values(record.summary.update)
        elif kind == "metric":
            found["axes"][record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found | {"files": {file.name for file in (folder / "files").iterdir()}}


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline(results: Path) -> dict[str, Path]:
    """Run id of W&B -> folder."""
    return {path.name.split("-", 3)[3]: path for path in (results / "wandb").glob("offline-run-*")}


def test_a_cell_is_logged_completely_and_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result, series = factory.result("naive", "int4", **STEPS)
    add(tmp_path, "naive", "int4")
    assert track(tmp_path, "quick", ("wandb",)) == 1
    ((identity, folder),) = offline(tmp_path).items()
    run = told(folder)
    assert run["run"].project == "lowbit" and run["run"].job_type == "quick" and run["run"].run_id == identity
    assert run["run"].display_name == "naive int4, seed 0" and list(run["run"].tags) == ["naive", "ok", "quick"]
    assert run["config"]["trainer.steps"] == "50" and run["config"]["package.torch"] == "2.13.0"
    assert run["config"]["tags"]["lowbit.run_id"] == result.run_id and run["exit"] == 0
    rows = {row["step"]: row for row in run["rows"]}
    assert sorted(rows) == list(range(51))  # step 0 has the evaluation of the base alone
    for name in ("reward/mean", "mismatch/kl_k3"):
        assert [rows[step][name] for step in range(1, 51)] == pytest.approx([row[name] for row in series])
        assert run["axes"][name] == "step"
    evals = {step: row["eval/accuracy_rollout"] for step, row in rows.items() if "eval/accuracy_rollout" in row}
    assert evals == pytest.approx({e.step: e.accuracy for e in result.evals if e.site == "rollout"})
    times = [rows[step]["_timestamp"] for step in range(51)]
    assert times == sorted(times) and times[0] >= 1767225600 and times[-1] == 1767225619
    assert run["summary"]["scores/auc"] == pytest.approx(result.summary["auc"])
    assert run["summary"]["time/update_s"] == 8.0 and not any("scores/auc" in row for row in run["rows"])
    assert {f"{result.run_id}.json", f"{result.run_id}.parquet"} <= run["files"]
    assert track(tmp_path, "quick", ("wandb",)) == 0 and len(offline(tmp_path)) == 1
    assert capfd.readouterr() == ("", "")


def test_a_new_record_is_a_new_run_and_a_failed_one_says_so(tmp_path: Path) -> None:
    lost = add(tmp_path, "naive", "int4", status="failed")
    assert track(tmp_path, "quick", ("wandb",)) == 1
    (first,) = offline(tmp_path)
    assert told(offline(tmp_path)[first])["exit"] == 1
    won = add(tmp_path, "naive", "int4")
    assert won.run_id == lost.run_id and log_all(tmp_path, "wandb")[0] == 1
    (second,) = set(offline(tmp_path)) - {first}
    assert told(offline(tmp_path)[second])["exit"] == 0 and log_all(tmp_path, "wandb")[0] == 0


def test_a_group_is_an_arm_also_where_names_are_provisional(tmp_path: Path) -> None:
    """While a sweep runs no arm has its label yet: arms that differ in a knob must not fall into one group."""
    tracker, folder = view.WandbTracker(tmp_path), tmp_path / "runs" / "quick"
    for seed in (0, 1):
        for cap in (2.0, 4.0):
            add(tmp_path, "flashrl", "int4", seed=seed, knobs={"TIS": {"cap": cap}})
    first, *others = read_results(folder)
    assert log_cell(tracker, "quick", first, folder, samples=[Point("system/cell_threads", 3.0, 1767225601_000, 0)])
    tracker.close()
    assert track(tmp_path, "quick", ("wandb",)) == len(others) == 3
    groups: dict[str, list[float]] = {}
    for path in offline(tmp_path).values():
        run = told(path)
        groups.setdefault(run["run"].run_group, []).append(float(run["config"]["knobs.TIS.cap"]))
    assert sorted(groups.values()) == [[2.0, 2.0], [4.0, 4.0]]
    sampled = told(offline(tmp_path)[next(name for name in offline(tmp_path) if first.run_id in name)])
    assert [(row["sample"], row["system/cell_threads"]) for row in sampled["rows"] if "sample" in row] == [(0, 3.0)]


def test_wandb_dying_warns_once_and_is_made_up_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process that W&B runs beside us is killed between two cells."""
    cells = [add(tmp_path, "naive", "int4", seed=seed) for seed in range(3)]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    tracker, folder = view.WandbTracker(tmp_path), tmp_path / "runs" / "quick"
    assert log_cell(tracker, "quick", cells[0], folder) == 1
    (core,) = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    core.kill()
    core.wait()
    assert [log_cell(tracker, "quick", cell, folder) for cell in cells[1:]] == [0, 0] and not tracker.is_on
    tracker.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: W&B is off, runs go on: ")
    assert line.endswith(" (later: lowbit results import --tracking wandb)")
    assert track(tmp_path, "quick", ("wandb",)) == 2 and track(tmp_path, "quick", ("wandb",)) == 0


def test_another_project_and_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path, "naive", "int4")
    (tmp_path / "wandb").write_text("where its folder would be")
    assert track(tmp_path, "quick", ("wandb",)) == 0
    assert capfd.readouterr().err.startswith("warning: W&B is off, runs go on: [Errno 17] File exists")
    (tmp_path / "wandb").unlink()
    monkeypatch.setenv("WANDB_PROJECT", "another")
    assert track(tmp_path, "quick", ("wandb",)) == 1
    assert [told(path)["run"].project for path in offline(tmp_path).values()] == ["another"]
