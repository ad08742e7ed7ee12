"""MLflow as a view: complete, logged once, replaced where a result changed, and never in the way of a run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.records.folder import saved_comparisons
from harness.records.run_result import read_results, write_result
from harness.report.leaderboard import leaderboard
from harness.report.verdicts import shown_verdict
from harness.viewers import mlflow
from harness.viewers.mlflow import links
from harness.viewers.trackers import log_all, track
from harness.viewers.tracking import facts
from tests import result_factory as factory
from tests.source_tree import ROOT
from tests.viewers.cases import ARMS, STEPS, add, connection, new_results, runs


def test_a_cell_is_logged_completely(results: Path) -> None:
    result, series = factory.result("naive", "int4", **STEPS)
    found = runs(results)
    arms = [f"{method} {precision}" for method, precision in ARMS]
    cells = [f"{arm}, seed {seed}" for arm in arms for seed in (0, 1)]
    assert sorted(found) == sorted(["overview", *arms, *cells])
    (child,), (parent,) = found["naive int4, seed 0"], found["naive int4"]
    tags, params, metrics = child.data.tags, child.data.params, child.data.metrics
    assert tags["mlflow.parentRunId"] == parent.info.run_id
    expected = {"kind": "cell", "arm": "naive int4", "method": "naive", "precision": "int4", "status": "ok", "n": "8",
                "length": "8", "model": "s", "mode": "decoupled", "seed": "0", "is_draft": "false", "task_hash": "bb",
                "model_hash": "aa", "question_hash": "sort-8", "commit": result.commit, "lowbit.run_id": result.run_id,
                "system_metrics": facts.REBUILT}  # fmt: skip
    assert {name: tags.get(name) for name in expected} == expected
    assert (params["precision.name"], params["trainer.steps"], params["package.torch"]) == ("int4", "50", "2.13.0")
    assert metrics["scores/auc"] == metrics["summary/auc"] == pytest.approx(result.summary["auc"])
    assert metrics["scores/reward"] == pytest.approx(result.summary["reward_last"])
    assert (metrics["time/update_s"], metrics["system/peak_memory_gib"]) == (8.0, 0.5)
    assert child.info.status == "FINISHED" and child.info.end_time - child.info.start_time == 19_000
    client, _ = connection(results)
    history = client.get_metric_history(child.info.run_id, "reward/mean")
    steps = [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, 44, 47, 50]
    assert [m.step for m in history] == steps
    assert [m.value for m in history] == pytest.approx([series[step - 1]["reward/mean"] for step in steps])
    evals = client.get_metric_history(child.info.run_id, "eval/accuracy_rollout")
    assert {m.step: m.value for m in evals} == {r.step: r.accuracy for r in result.evals if r.site == "rollout"}
    names = {file.path for file in client.list_artifacts(child.info.run_id)}
    assert names == {f"{result.run_id}.json", f"{result.run_id}.parquet", "passport.json"}


def test_the_data_and_the_base_are_inputs(results: Path) -> None:
    client, experiment = connection(results)
    children = [run for found in runs(results, "tags.kind = 'cell'").values() for run in found]
    data = {
        (i.dataset.name, i.dataset.digest, i.dataset.profile) for run in children for i in run.inputs.dataset_inputs
    }
    assert data == {("sort n=8", "bb", json.dumps({"question_hash": "sort-8", "num_eval": 512}))}
    (model,) = client.search_logged_models([experiment.experiment_id])
    assert (model.name[:6], model.tags["model_hash"], str(model.status)) == ("s-base", "aa", "READY")
    inputs = [client.get_run(run.info.run_id).inputs.model_inputs for run in children]  # a search leaves them out
    assert [[i.model_id for i in found] for found in inputs] == [[model.model_id]] * 6


def test_an_arm_has_the_leaderboards_numbers(results: Path) -> None:
    board = leaderboard(read_results(results / "runs" / "quick")).set_index("arm")
    for name in board.index:
        (arm,), row = runs(results)[name], board.loc[name]
        assert arm.data.tags["verdict"] == shown_verdict(row) and arm.data.tags["seeds"] == "2"
        assert arm.data.tags["is_preliminary"] == "true"
        for ours in ("auc", "auc_low", "auc_high", "accuracy", "rollout_accuracy", "reward"):
            assert arm.data.metrics[f"scores/{ours}"] == pytest.approx(row[ours])
        assert arm.data.metrics["summary/k3_max"] == pytest.approx(row["k3_max"])
        assert arm.data.metrics.get("verdict/difference") == (
            None if row["verdict"] == "control" else pytest.approx(row["difference"])
        )
        assert "seed" not in arm.data.params and arm.data.params["trainer.steps"] == "50"
        cells = [runs(results)[f"{name}, seed {seed}"][0] for seed in (0, 1)]
        assert arm.data.metrics["scores/auc"] == pytest.approx(sum(c.data.metrics["scores/auc"] for c in cells) / 2)
    words = runs(results)["naive int4"][0].data.tags["mlflow.note.content"]
    assert words.startswith("Mean over 2 seeds (2 ok): AUC 0.") and "Against bf16 bf16: -" in words


def test_arms_have_the_mean_curves_of_their_runs(results: Path) -> None:
    """Two methods' arms are compared as curves: at every logged step the mean over both seeds."""
    client, _ = connection(results)
    found = runs(results)
    curves: dict[str, list[float]] = {}
    for arm in ("naive int4", "flashrl int4"):
        both = [factory.result(*arm.split(), seed=seed, **STEPS) for seed in (0, 1)]
        history = client.get_metric_history(found[arm][0].info.run_id, "reward/mean")
        assert [point.step for point in history] == list(range(2, 51, 3))
        means = [np.mean([series[point.step - 1]["reward/mean"] for _, series in both]) for point in history]
        curves[arm] = [point.value for point in history]
        assert curves[arm] == pytest.approx(means)
        accuracy = client.get_metric_history(found[arm][0].info.run_id, "eval/accuracy_reference")
        scores = {step: np.mean([next(e.accuracy for e in result.evals if (e.site, e.step) == ("reference", step))
                                 for result, _ in both]) for step in (0, 25, 50)}  # fmt: skip
        assert {point.step: point.value for point in accuracy} == pytest.approx(scores)
    assert curves["naive int4"] != curves["flashrl int4"]


def test_saved_views_find_what_their_titles_say(results: Path) -> None:
    client, experiment = connection(results)
    key = links.view_key("flashrl against naive at int4")
    view = json.loads(experiment.tags[links.TAG + key])
    assert sorted(runs(results, view["searchFilter"])) == ["flashrl int4", "naive int4"]
    assert "metrics.`scores/auc`" in view["selectedColumns"] and view["orderByKey"] == links.ORDER
    note = experiment.tags["mlflow.note.content"]
    assert note.startswith("Do low-bit rollouts cost accuracy")
    page = f"#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={key}&workflowType=machine_learning"
    assert f"[flashrl against naive at int4]({page})" in note
    pages = {title: sorted(runs(results, words)) for title, (words, _) in links.PAGES.items()}
    assert pages["All arms"] == ["bf16 bf16", "flashrl int4", "naive int4"] and pages["Diverged or failed"] == []
    assert len(pages["Single runs"]) == 6 and pages["Tables and figures"] == ["overview"]
    (overview,) = runs(results)["overview"]
    assert [file.path for file in client.list_artifacts(overview.info.run_id, "figures")] == ["figures/overview.png"]
    assert [file.path for file in client.list_artifacts(overview.info.run_id, "tables")] == ["tables/quick.md"]


def test_again_changes_nothing_and_a_new_result_replaces_the_old(tmp_path: Path, empty_store: Path) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    assert track(results, "quick", ("mlflow",)) == 3
    before = runs(results)
    assert log_all(results, "mlflow") == (0, True)
    assert {k: v[0].info for k, v in runs(results).items()}.keys() == before.keys()
    lost = add(results, seed=1, status="failed")
    assert track(results, "quick", ("mlflow",)) == 1
    assert runs(results)["bf16 bf16, seed 1"][0].info.status == "FAILED"
    assert runs(results)["bf16 bf16"][0].data.tags["status"] == "1 ok, 1 failed"
    won = add(results, seed=1)
    assert won.run_id == lost.run_id and log_all(results, "mlflow") == (1, True)
    after = runs(results)
    assert [run.info.status for run in after["bf16 bf16, seed 1"]] == ["FINISHED"]
    assert after["bf16 bf16"][0].data.tags["seeds"] == "2"
    aucs = [after[f"bf16 bf16, seed {seed}"][0].data.metrics["scores/auc"] for seed in (0, 1)]
    assert after["bf16 bf16"][0].data.metrics["scores/auc"] == pytest.approx(sum(aucs) / 2)
    for name, (run,) in before.items():
        is_same = [other.info.run_id for other in after[name]] == [run.info.run_id]
        assert len(after[name]) == 1 and is_same == (name != "bf16 bf16")  # a curve's old points cannot be taken back
    arm = after["bf16 bf16"][0].info.run_id
    assert {after[f"bf16 bf16, seed {seed}"][0].data.tags["mlflow.parentRunId"] for seed in (0, 1)} == {arm}
    history = connection(results)[0].get_metric_history(arm, "reward/mean")
    assert len(history) == 17 == len({point.step for point in history})


def test_an_outage_in_the_middle_warns_once_and_is_made_up_for(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    results = new_results(tmp_path, empty_store, seeds=1)

    def down(*_args: object, **_kwargs: object) -> None:
        raise MlflowException("the disk is\nfull")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_inputs", down)
        assert track(results, "quick", ("mlflow",)) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: MLflow is off, runs go on: the disk is full (later: lowbit results import)"]
    assert log_all(results, "mlflow") == (3, True)
    assert {name: len(found) for name, found in runs(results).items()} == dict.fromkeys(
        ["overview", *(f"{m} {p}{end}" for m, p in ARMS for end in ("", ", seed 0"))], 1
    )


def test_a_run_has_all_its_parameters(tmp_path: Path, empty_store: Path) -> None:
    """MLflow takes 100 a request; a run on a GPU with a method of many knobs has more."""
    results = new_results(tmp_path, empty_store, seeds=1)
    result, series = factory.result("naive", "int4", **STEPS)
    hardware = {f"part {i}": "x" for i in range(150)}
    write_result(results / "runs" / "quick", result.model_copy(update={"hardware": hardware}), series)
    assert track(results, "quick", ("mlflow",)) == 3
    for name in ("naive int4, seed 0", "naive int4"):
        (run,) = runs(results)[name]
        assert len(run.data.params) > 150 and run.data.params["hardware.part 149"] == "x"


def test_a_store_that_is_not_there_only_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path)
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"this is no database" * 100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for uri in ("", f"http://127.0.0.1:{port}", "nonsense://x"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert track(tmp_path, "quick", ("mlflow",)) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: MLflow is off, runs go on: ")


KILLED_STORE = """
import os, pathlib, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from harness.viewers import mlflow

seen = []

@event.listens_for(Engine, "before_cursor_execute")
def kill(connection, cursor, statement, *rest):
    seen.append(statement.split()[:2])
    if seen[-2:] == [["CREATE", "TABLE"], ["INSERT", "INTO"]]:  # half of MLflow's migrations
        os.kill(os.getpid(), 9)

mlflow.Tracker.open(results=pathlib.Path(sys.argv[1]))
"""


def test_a_store_whose_making_was_killed_is_made_anew(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_STORE, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert mlflow.Tracker.open(results=tmp_path).is_on
    assert [path.name for path in (tmp_path / "mlflow").iterdir()] == ["mlflow.db"]


def test_a_bad_file_is_named_and_left_alone(tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture) -> None:
    results = new_results(tmp_path, empty_store, seeds=1)
    folder = results / "runs" / "quick"
    stranger, _ = factory.result(sweep="other", seed=9, **STEPS)
    (folder / "half.json").write_text('{"run_id": "ha')
    (folder / f"{stranger.run_id}.json").write_bytes(stranger.model_dump_json().encode())
    torn = next(folder.glob("*.parquet"))
    torn.write_bytes(b"PAR1 and no more")
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert log_all(results, "mlflow") == (2, True)
    said = capsys.readouterr().err
    assert f"warning: left alone: {torn}: not a Parquet file" in said
    assert f"left alone: {folder / 'half.json'}: not a result file" in said
    assert f"{stranger.run_id}.json: belongs to the sweep 'other'" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


def test_mlflow_is_loaded_only_when_used() -> None:
    code = "import sys, harness.viewers.mlflow; print([m for m in ('mlflow', 'torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_view_keys_are_names_that_mlflow_takes_and_differ() -> None:
    rows = [
        {"arm": f"{m} {p} {c}", "method": m, "precision": p, "variant": "", "context": c}
        for m in ("qurl", "jet_rl", "flashrl", "naive")
        for p in ("int8", "fp8_block+kv8", "fp8_block")
        for c in ("xs n=8", "s n=16")
    ]
    saved = saved_comparisons(rows, ("flashrl", "naive"))
    keys = [links.view_key(comparison.title) for comparison in saved]
    assert len(set(keys)) == len(keys) == 2 * (1 + 3 + 3 * 5) + 3 * 5
    assert all(re.fullmatch(r"[a-z0-9_.-]+", key) for key in keys)
    assert {"qurl against flashrl at int8, every context", "all methods at fp8_block+kv8, xs n=8"} <= {
        comparison.title for comparison in saved
    }
    (pair,) = [c for c in saved if c.title == "qurl against flashrl at int8, s n=16"]
    assert pair.arms == ("qurl int8 s n=16", "flashrl int8 s n=16")
    assert links.condition(pair) == (
        "tags.kind = 'arm' AND tags.precision = 'int8' AND tags.context = 's n=16' "
        "AND tags.pairs LIKE '%|qurl against flashrl|%'"
    )
    assert links.pairs_of("naive int8 s n=16", saved).count("|") == 4
    assert len(links.note("", "1", saved * 9)) < 20_000 and " more: " in links.note("", "1", saved * 9)[-70:]
