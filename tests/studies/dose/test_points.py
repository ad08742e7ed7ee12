"""Runs as points: losses and doses by hand, controls of an equal setting alone, and the runs that stay out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.records.paths import predictions_path
from harness.studies.dose.points import DOSE, START, correction_of, curve_points, points, read_all_points, run_doses
from tests import result_factory as factory
from tests.studies.dose import made


def found(*runs: Any) -> dict[str, Any]:
    """Points by method and format."""
    series = {result.run_id: {name: [row[name] for row in rows] for name in rows[0]} for result, rows in runs}
    return {p.run_id: p for p in points([result for result, _ in runs], series)}


def test_loss_and_doses_by_hand() -> None:
    control = made.run("s", "bf16", "bf16", auc=0.7, k3=1e-6)
    low = made.run("s", "naive", "int4", auc=0.55, k3=0.02, length=9.0)
    (one,) = found(control, low).values()
    assert one.loss == pytest.approx(0.15)
    assert (one.correction, one.task, one.precision, one.length, one.size) == ("none", "sort", "int4", 8, "s")
    assert one.base == "s sort 8 0 " and one.held_out == "sort s 8 embedded" and not one.has_collapsed
    # Six steps of 0.03 and six of 0.01 times 9 tokens; the first five steps have three of the former.
    assert one.dose == pytest.approx(0.18) and one.doses[START] == pytest.approx(0.27)
    assert one.doses["k3 alone"] == pytest.approx(0.02) and one.doses["length alone"] == 9
    assert one.doses["|k1| x length"] == pytest.approx(0.18) and one.doses["chi2 x length"] == pytest.approx(0.36)
    assert one.doses["1 - ESS"] == pytest.approx(0.1)
    assert one.doses["spread of log-ratio"] == pytest.approx(math.sqrt(math.pi / 2 * 0.02 * 9))
    # Ten tokens of 100 at k3 and ten at three times as much.
    assert one.doses["k3 x length, entropy from 0.1"] == pytest.approx(0.4 * 0.02 * 9)


def test_the_spread_is_that_of_normal_log_ratios() -> None:
    d = 0.3 * np.random.default_rng(1).standard_normal((200_000, 9))
    columns = {"mismatch/logp_absdiff_mean": [float(np.abs(d).mean())], "rollout/length_mean": [9.0]}
    assert run_doses(columns)["spread of log-ratio"] == pytest.approx(float(d.sum(1).std()), rel=0.01)


def test_a_missing_column_leaves_its_dose_unknown() -> None:
    doses = run_doses({"mismatch/kl_k3": [0.1, 0.3], "rollout/length_mean": [10.0, 10.0]})
    assert doses[DOSE] == pytest.approx(2.0) and doses["k3 alone"] == pytest.approx(0.2)
    assert all(math.isnan(doses[name]) for name in ("chi2 x length", "1 - ESS", "spread of log-ratio"))
    assert math.isnan(doses["k3 x length, entropy from 0.1"])


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"seed": 1}, "another seed and base"),
        ({"trainer__steps": 40}, "another number of steps"),
        ({"task__n": 16}, "another length"),
        ({"engine__name": "vllm"}, "another engine"),
    ],
)
def test_a_control_of_another_setting_is_none(own: dict[str, Any], why: str) -> None:
    low = made.run("s", "naive", "int4", auc=0.5, k3=0.02)
    assert not found(made.run("s", "bf16", "bf16", auc=0.7, **own), low), why
    assert found(made.run("s", "naive", "bf16", auc=0.7), low), "naive in bf16 is the control, too"


def test_only_decoupled_fresh_rollouts_are_points() -> None:
    control = made.run("s", "bf16", "bf16", auc=0.7)
    mode = dict(factory.config("naive", "int4")["algo"])
    other = made.run("s", "naive", "int4", auc=0.5, algo=mode | {"mode": "bypass_ppo"})
    stale = made.run("s", "naive", "int4", auc=0.5, algo=mode | {"staleness": 2})
    failed = made.run("s", "naive", "int8", auc=0.5, status="failed")
    assert not found(control, other, stale, failed)


def test_kinds_of_dose_are_held_against_fresh_bf16() -> None:
    control, mode = made.run("s", "bf16", "bf16", auc=0.7), dict(factory.config("bf16", "bf16")["algo"])
    part = {"knobs": {"WeightNoise": {"sigma": 0.1, "draw": "fresh"}}}
    both = ["bf16_tis.TIS", "weight_noise.WeightNoise"]
    runs = {
        "staleness 2": made.run("s", "bf16", "bf16", auc=0.5, algo=mode | {"staleness": 2}),
        "fresh noise 0.1": made.run("s", "weight_noise", "bf16", auc=0.6, **part),
        "bf16": made.run("s", "bf16_tis", "bf16", auc=0.65),
        "int4": made.run("s", "naive", "int4", auc=0.4),
    }
    tis = made.run("s", "bf16_tis", "bf16", auc=0.3, parts=both, **part)
    points_of = found(control, *runs.values(), tis, made.run("s", "naive", "int4", auc=0.1, **part))
    assert {p.source: (p.kind, p.correction, round(p.loss, 6)) for name, p in points_of.items()
            if name != tis[0].run_id} == {
        "staleness 2": ("staleness", "none", 0.2), "fresh noise 0.1": ("fresh noise", "none", 0.1),
        "bf16": ("format", "TIS", 0.05), "int4": ("format", "none", 0.3),
    }  # fmt: skip
    one = points_of[tis[0].run_id]
    assert (one.kind, one.correction, one.spread) == ("fresh noise", "TIS", control[0].config["model"]["spread"])
    assert not found(runs["staleness 2"], runs["int4"]), "a stale run is no control"


def test_collapse_is_half_of_the_start_or_divergence() -> None:
    control = made.run("s", "bf16", "bf16", auc=0.7)
    runs = [made.run("s", "naive", "int4", auc=0.5, end=0.19), made.run("s", "naive", "nvfp4", auc=0.5, end=0.21),
            made.run("s", "naive", "int3", auc=0.5, end=0.5, status="diverged")]  # fmt: skip
    assert {p.precision: p.has_collapsed for p in found(control, *runs).values()} == {
        "int4": True, "nvfp4": False, "int3": True,
    }  # fmt: skip


def test_a_run_that_stands_where_its_control_collapsed_is_left_out() -> None:
    control = made.run("s", "bf16", "bf16", auc=0.3, end=0.1)
    runs = [made.run("s", "naive", "int4", auc=0.5, end=0.5), made.run("s", "naive", "nvfp4", auc=0.2, end=0.1)]
    assert {p.precision: (p.has_collapsed, round(p.loss, 6)) for p in found(control, *runs).values()} == {
        "nvfp4": (True, 0.1)
    }


@pytest.mark.parametrize(
    ("method", "changes", "name"),
    [
        ("naive", {}, "none"),
        ("flashrl", {}, "TIS"),
        ("mis", {}, "MIS"),
        ("k3_rs_tis", {}, "K3RS+TIS"),
        ("flashrl", {"knobs": {"TIS": {"cap": 5.0}}}, None),
        ("naive", {"parts": ["methods.flashrl.TIS"]}, None),
        ("weight_noise", {"knobs": {"WeightNoise": {"sigma": 0.3}}}, "none"),
        ("icepop", {"parts": ["icepop.IcePop", "weight_noise.WeightNoise"]}, "IcePop"),
        ("icepop", {"parts": ["weight_noise.WeightNoise"]}, None),
        ("qerl", {}, None),
        ("jet_rl", {}, None),
        ("vcpo", {}, None),
        ("lr_decay", {}, None),
        ("alp", {}, None),
        ("a method that was taken out", {}, None),
    ],
)
def test_corrections_alone_are_named(method: str, changes: dict[str, Any], name: str | None) -> None:
    config = {"method": method, "parts": [], "knobs": {}} | changes
    assert correction_of(config) == name


def test_every_run_is_read_once_and_held_out_sweeps_are_not(tmp_path: Path) -> None:
    runs = [made.run("a", "bf16", "bf16", auc=0.7), made.run("a", "naive", "int4", auc=0.5)]
    for sweep in ("a", "b", "search_c"):
        made.keep(tmp_path, sweep, runs)
    made.keep(tmp_path, "d", [made.run("d", "bf16", "bf16", auc=0.7, seed=1),
                              made.run("d", "naive", "int4", auc=0.6, seed=1)])  # fmt: skip
    assert [round(p.loss, 6) for p in curve_points(read_all_points(tmp_path))] == [0.2, 0.1]
    predictions_path(tmp_path, "d").parent.mkdir()
    predictions_path(tmp_path, "d").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"predictions/d.json is not valid JSON: "):
        read_all_points(tmp_path)
    predictions_path(tmp_path, "d").write_text(json.dumps({"predictions": []}), encoding="utf-8")
    assert [round(p.loss, 6) for p in curve_points(read_all_points(tmp_path))] == [0.2]
    assert [(round(p.loss, 6), p.is_held_out) for p in read_all_points(tmp_path)] == [(0.2, False), (0.1, True)]


def test_no_run_with_a_control_is_an_error(tmp_path: Path) -> None:
    made.keep(tmp_path, "search_c", [made.run("a", "naive", "int4", auc=0.5)])
    with pytest.raises(ValueError, match="holds no run with a control; pack a sweep first"):
        curve_points(read_all_points(tmp_path))
