"""Predictions from a probe for a sweep's own arms, and how they came out."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import RunConfig
from harness.records.paths import predictions_path
from harness.studies.dose.predictions import outcome_page, outcomes, predict, read_outcomes, write_predictions
from harness.studies.dose.study import Study, study
from harness.sweep.planning import plan, read_sweep
from tests.studies.dose import made

FILE = """
question: What does a length lose that has not run?
overrides: [model=s, task=sort, task.n=12, trainer.steps=80]
arms:
  - {method: bf16}
  - {method: [naive, flashrl], precision: [int8, int4]}
  - {method: mis, precision: int4}
seeds: [0, 1]
"""
ROWS = {"bf16": 1e-5, "int8": 2e-3, "int4": 0.2, "nvfp4": 0.1}


@cache
def known() -> Study:
    return study(made.cloud(30))


@pytest.fixture
def cells(tmp_path: Path) -> tuple[RunConfig, ...]:
    path = tmp_path / "twelve.yaml"
    path.write_text(FILE, encoding="utf-8")
    return plan(read_sweep(str(path))).cells


def probe(spread: float = 0.5, n: int = 12) -> dict[str, Any]:
    weights = {"bf16": "bf16", "int8": "int8_channel", "int4": "int4_g32", "nvfp4": "nvfp4"}
    return {
        "id": "abc", "folder": "base", "config": {"task": {"name": "sort", "n": n}, "model": {"spread": spread}},
        "formats": [
            {"precision": name, "mismatch": {"kl_k3": k3}, "length_mean": 13.0,
             "passport": {"weights": {"bf16": 18, weights[name]: 28}}} for name, k3 in ROWS.items()
        ],
    }  # fmt: skip


def test_the_sweeps_own_arms_are_predicted_from_the_curve(cells: tuple[RunConfig, ...]) -> None:
    found = predict(known(), probe(), "twelve", cells)
    rows = {(row["precision"], row["correction"]): row for row in found["predictions"]}
    assert list(rows) == [("int8", "none"), ("int4", "none"), ("int8", "TIS"), ("int4", "TIS")]
    for (precision, correction), row in rows.items():
        assert row["dose"] == pytest.approx(ROWS[precision] * 13)
        assert row["loss"] == pytest.approx(made.lost(ROWS[precision] * 13, correction), abs=0.03)
    assert rows["int4", "none"]["loss"] > rows["int4", "TIS"]["loss"] + 0.08
    assert found["num_runs"] == len(known().points) and found["probe"] == "abc"


def test_a_probe_of_another_setting_is_refused(cells: tuple[RunConfig, ...]) -> None:
    for given, words in (
        (probe(spread=0.0), r"model.spread=0.0, twelve model.spread=0.5"),
        (probe(n=8), r"task.n=8, twelve task.n=12"),
    ):
        with pytest.raises(ValueError, match=words):
            predict(known(), given, "twelve", cells)
    other = copy.deepcopy(probe())
    other["formats"][2]["passport"]["weights"] = {"bf16": 18, "int4_g128": 28}
    with pytest.raises(ValueError, match=r"int4_g32, probe abc has bf16 and int4_g128; .*--precisions int4=int4_g32"):
        predict(known(), other, "twelve", cells)
    other["formats"] = other["formats"][:2]
    with pytest.raises(ValueError, match="probe abc has none"):
        predict(known(), other, "twelve", cells)
    with pytest.raises(ValueError, match="no low-bit arm without a correction or with TIS"):
        predict(known(), probe(), "twelve", [c for c in cells if c.method in ("bf16", "mis")])


def test_predictions_are_written_once(tmp_path: Path, cells: tuple[RunConfig, ...]) -> None:
    found = predict(known(), probe(), "twelve", cells)
    path = write_predictions(tmp_path, found)
    assert path == predictions_path(tmp_path, "twelve") and json.loads(path.read_bytes()) == found
    before = path.read_bytes()
    with pytest.raises(ValueError, match="there already; predictions are made once"):
        write_predictions(tmp_path, found | {"predictions": []})
    assert path.read_bytes() == before


def test_outcomes_by_hand() -> None:
    said = [{"precision": "int4", "correction": "none", "dose": 2.0, "loss": 0.25},
            {"precision": "int3", "correction": "none", "dose": 9.0, "loss": 0.5}]  # fmt: skip
    runs = [made.point(loss, dose, f"b{k}") for k, (loss, dose) in enumerate(((0.1, 1.0), (0.2, 3.0), (0.3, 2.0)))]
    fallen = made.point(0.6, 9.0, "b3", has_collapsed=True)
    (one,) = outcomes(said, [*runs, fallen, made.point(0.9, 2.0, correction="TIS")])
    assert (one.loss, one.found_dose, one.num_runs, one.num_collapsed) == (pytest.approx(0.2), 2.0, 4, 1)
    assert one.error == pytest.approx(-0.05) and one.high - one.loss == pytest.approx(4.302653 * 0.1 / 3**0.5)
    page = outcome_page("twelve", [one])
    assert (
        "root mean square error 0.050, mean error -0.050" in page and "to predict no loss at all errs by 0.200" in page
    )
    assert "1 lie in the interval" in page and "| int4 | none | 2 | 2 | +0.250 | +0.200 [" in page
    assert "| -0.050 | 4, 1 collapsed |" in page


def test_a_run_before_its_prediction_is_refused(tmp_path: Path) -> None:
    said = {"made": "2026-01-01T12:00:00+00:00", "predictions": [
        {"precision": "int4", "correction": "none", "dose": 0.1, "loss": 0.1}]}  # fmt: skip
    path = predictions_path(tmp_path, "late")
    path.parent.mkdir()
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ValueError, match=r"late\.zip is missing; predict first"):
        read_outcomes(tmp_path, "late")

    def results(folder: str, *starts: str) -> Path:
        runs = [run for seed, start in enumerate(starts) for run in (
            made.run("late", "bf16", "bf16", auc=0.7, seed=seed, started=start),
            made.run("late", "naive", "int4", auc=0.55, seed=seed, started=start))]  # fmt: skip
        made.keep(tmp_path / folder, "late", runs)
        target = predictions_path(tmp_path / folder, "late")
        target.parent.mkdir()
        target.write_bytes(path.read_bytes())
        return tmp_path / folder

    early = results("early", "2026-01-01T12:00:01+00:00", "2026-01-01T12:00:00+00:00")
    with pytest.raises(ValueError, match=r"naive-int4-s1.* of late ran before the predictions were made"):
        read_outcomes(early, "late")
    fine = results("fine", "2026-01-01T13:30:00+01:00", "2026-01-01T12:00:01")  # an hour of another zone, and UTC
    (one,) = read_outcomes(fine, "late")
    assert one.loss == pytest.approx(0.15) and one.error == pytest.approx(0.05) and one.num_runs == 2
