"""Predictions from a probe for a sweep's own arms, and how they came out."""

from __future__ import annotations

import copy
import json
import math
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.config.load import run_id
from harness.config.schema import RunConfig
from harness.records.packed import read_packed
from harness.records.paths import packed_path, predictions_path
from harness.studies.dose.points import predicted_runs
from harness.studies.dose.predictions import (
    is_predictable,
    known_dose,
    outcome_page,
    outcomes,
    predict,
    probed_dose,
    read_outcomes,
    write_predictions,
)
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
ROOT = Path(__file__).parents[3]
ROWS = {"bf16": 1e-5, "int8": 2e-3, "int4": 0.2, "nvfp4": 0.1}


@cache
def known() -> Study:
    return study(made.cloud(30))


@pytest.fixture
def cells(tmp_path: Path) -> tuple[RunConfig, ...]:
    path = tmp_path / "twelve.yaml"
    path.write_text(FILE, encoding="utf-8")
    return plan(read_sweep(str(path))).cells


def probe(spread: float = 0.5, n: int = 12, engine: str = "embedded") -> dict[str, Any]:
    weights = {"bf16": "bf16", "int8": "int8_channel", "int4": "int4_g32", "nvfp4": "nvfp4"}
    return {
        "id": "abc", "folder": "base", "config": {
            "task": {"name": "sort", "n": n}, "model": {"spread": spread}, "engine": {"name": engine}},
        "formats": [
            {"precision": name, "mismatch": {"kl_k3": k3}, "length_mean": 13.0,
             "passport": {"weights": {"bf16": 18, weights[name]: 28}}} for name, k3 in ROWS.items()
        ],
    }  # fmt: skip


def test_the_sweeps_own_arms_are_predicted_from_the_curve(cells: tuple[RunConfig, ...]) -> None:
    found = predict(known(), "twelve", cells, probed_dose([probe()], "twelve"), {"probe": "abc"})
    rows = {(row["precision"], row["correction"]): row for row in found["predictions"]}
    assert list(rows) == [("int8", "none"), ("int4", "none"), ("int8", "TIS"), ("int4", "TIS")]
    for (precision, correction), row in rows.items():
        assert row["length"] == 12 and row["dose"] == pytest.approx(ROWS[precision] * 13)
        assert row["loss"] == pytest.approx(made.lost(ROWS[precision] * 13, correction), abs=0.03)
        method = made.METHODS[correction]
        assert row["runs"] == [run_id(c) for c in cells if (c.method, c.precision.name) == (method, precision)]
        assert len(row["runs"]) == 2
    assert rows["int4", "none"]["loss"] > rows["int4", "TIS"]["loss"] + 0.08
    assert found["num_runs"] == len(known().points) and found["probe"] == "abc"


def test_what_has_run_is_not_predicted(cells: tuple[RunConfig, ...]) -> None:
    dose = probed_dose([probe()], "twelve")
    ran = [run_id(c) for c in cells if c.precision.name == "int8" or c.seed == 0]
    found = predict(known(), "twelve", cells, dose, {"probe": "abc"}, ran)["predictions"]
    assert [(row["precision"], row["correction"]) for row in found] == [("int4", "none"), ("int4", "TIS")]
    left = {run_id(c) for c in cells if c.precision.name == "int4" and c.seed == 1 and c.method in ("naive", "flashrl")}
    assert {name for row in found for name in row["runs"]} == left and len(left) == 2
    with pytest.raises(ValueError, match="no low-bit arm without a correction or with TIS that has not run"):
        predict(known(), "twelve", cells, dose, {}, [run_id(c) for c in cells])


def test_another_mode_and_an_old_sampler_are_not_predicted(cells: tuple[RunConfig, ...]) -> None:
    naive = next(c for c in cells if c.method == "naive")
    assert is_predictable(naive, "none") and not is_predictable(naive, "TIS")
    for changed in ({"mode": "bypass_ppo"}, {"staleness": 4}):
        assert not is_predictable(replace(naive, algo=replace(naive.algo, **changed)), "none")
    assert not is_predictable(next(c for c in cells if c.method == "bf16"), "none")


def test_a_probe_of_another_setting_is_refused(cells: tuple[RunConfig, ...]) -> None:
    def refused(given: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            predict(known(), "twelve", cells, probed_dose([given], "twelve"), {})

    refused(probe(spread=0.0), r"model.spread=0.0, twelve model.spread=0.5")
    refused(probe(n=8), r"task.n=8, twelve task.n=12")
    refused(probe(engine="vllm"), r"engine=vllm, twelve engine=embedded")
    other = copy.deepcopy(probe())
    other["formats"][2]["passport"]["weights"] = {"bf16": 18, "int4_g128": 28}
    refused(other, r"int4_g32, probe abc has bf16 and int4_g128; .*--precisions int4=int4_g32")
    other["formats"] = other["formats"][:2]
    refused(other, "probe abc has none")
    only = [c for c in cells if c.method in ("bf16", "mis")]
    with pytest.raises(ValueError, match="no low-bit arm without a correction or with TIS"):
        predict(known(), "twelve", only, probed_dose([probe()], "twelve"), {})


KINDS = """
question: Which kind of dose loses more?
overrides: [model=s, task=sort, task.n=12, trainer.steps=80]
arms:
  - {method: bf16, model.spread: [0.0, 0.5]}
  - {method: naive, precision: int4, model.spread: [0.0, 0.5]}
  - {method: weight_noise, knobs.WeightNoise.sigma: 0.1, knobs.WeightNoise.draw: [fixed, fresh]}
  - {method: bf16, algo.staleness: 2}
seeds: [0, 1]
"""


def test_noise_and_spreads_are_predicted_from_probes_of_their_own_and_staleness_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ways.yaml"
    path.write_text(KINDS, encoding="utf-8")
    cells = plan(read_sweep(str(path))).cells
    flat, spread = probe(spread=0.0), probe()
    flat["formats"][2]["mismatch"] = {"kl_k3": 0.05}
    spread["noise"] = [{"sigma": 0.1, "kl_k3": 0.3, "length_mean": 12.0}]
    found = predict(known(), "ways", cells, probed_dose([spread, flat], "ways"), {})["predictions"]
    doses = {row["precision"]: row["dose"] for row in found}
    assert doses == pytest.approx({
        "int4, spread 0": 0.05 * 13, "int4, spread 0.5": 0.2 * 13, "fixed noise 0.1, spread 0.5": 3.6,
        "fresh noise 0.1, spread 0.5": 3.6,
    })  # fmt: skip
    ids = [name for row in found for name in row["runs"]]
    stale = {run_id(c) for c in cells if c.algo.staleness or c.precision.name == c.method}
    assert len(ids) == len(set(ids)) == 8 and not stale & {*ids}
    runs = [made.point(0.1 * k, 1.0, run_id=name, precision="bf16") for k, name in enumerate(found[2]["runs"])]
    assert [(o.precision, o.loss, o.num_runs) for o in outcomes(found[2:3], runs)] == [
        (found[2]["precision"], pytest.approx(0.05), 2)
    ]
    del spread["noise"]
    with pytest.raises(ValueError, match=r"ways has noise of sigma 0\.1, probe abc has none; probe with --noise-like"):
        predict(known(), "ways", cells, probed_dose([spread, flat], "ways"), {})


def test_doses_of_runs_by_hand(cells: tuple[RunConfig, ...]) -> None:
    """Medians at 8 and 32, k3 of 0.02 and 0.08 a digit: 0.04 at 16, and the nearest k3 beyond the ends."""
    runs = [made.point(0.0, dose, length=8) for dose in (0.1, 0.16, 9.0)]
    runs += [made.point(0.0, 2.56, length=32), made.point(0.0, 77.0, length=32, has_collapsed=True),
             made.point(0.0, 5.0, length=16, correction="TIS"), made.point(0.0, 5.0, length=16, size="m"),
             made.point(0.0, 5.0, length=16, engine="vllm"), made.point(0.0, 5.0, length=16, task="copy"),
             made.point(0.0, 5.0, length=16, precision="int8")]  # fmt: skip
    dose, cell = known_dose(runs, "earlier"), next(c for c in cells if c.precision.name == "int4")

    def at(n: int) -> float:
        return dose(replace(cell, task=replace(cell.task, n=n)))

    assert [at(n) for n in (8, 16, 32)] == [pytest.approx(0.16), pytest.approx(0.64), pytest.approx(2.56)]
    assert at(4) == pytest.approx(0.08) and at(64) == pytest.approx(5.12)
    with pytest.raises(
        ValueError, match=r"no run of earlier has nvfp4 without a correction on task=sort, model=s, engine"
    ):
        dose(replace(cell, precision=replace(cell.precision, name="nvfp4")))


def test_sizes_of_a_sweep_are_predicted_apart(cells: tuple[RunConfig, ...]) -> None:
    """The k3 of INT4 is five times as large on `s` as on `m`: no run of one has the other's dose."""
    both = [replace(cell, model=replace(cell.model, name=name)) for name in ("s", "m128") for cell in cells]
    runs = [made.point(0.0, dose, length=12, size=size, precision=name)
            for size, dose in (("s", 1.0), ("m", 0.2)) for name in ("int8", "int4")]  # fmt: skip
    found = predict(known(), "twelve", both, known_dose(runs, "earlier"), {})["predictions"]
    assert [(row["precision"], row["dose"]) for row in found if row["correction"] == "none"] == [
        ("int8, model s", 1.0), ("int4, model s", 1.0), ("int8, model m", 0.2), ("int4, model m", 0.2),
    ]  # fmt: skip


def test_a_task_without_a_size_has_one_dose(cells: tuple[RunConfig, ...]) -> None:
    runs = [made.point(0.0, dose, length=0) for dose in (0.1, 0.16, 9.0)]
    cell = next(c for c in cells if c.precision.name == "int4")
    assert known_dose(runs, "earlier")(replace(cell, task=replace(cell.task, n=None))) == pytest.approx(0.16)


def test_predictions_are_written_once(tmp_path: Path, cells: tuple[RunConfig, ...]) -> None:
    found = predict(known(), "twelve", cells, probed_dose([probe()], "twelve"), {"probe": "abc"})
    path = write_predictions(tmp_path, found)
    assert path == predictions_path(tmp_path, "twelve") and json.loads(path.read_bytes()) == found
    before = path.read_bytes()
    with pytest.raises(ValueError, match="there already; predictions are made once"):
        write_predictions(tmp_path, found | {"predictions": []})
    assert path.read_bytes() == before


SAID = {"sweep": "twelve", "probe": "abc"}


def test_outcomes_by_hand() -> None:
    said = [{"precision": "int4", "correction": "none", "dose": 2.0, "loss": 0.25},
            {"precision": "int3", "correction": "none", "dose": 9.0, "loss": 0.5}]  # fmt: skip
    runs = [made.point(loss, dose, f"b{k}") for k, (loss, dose) in enumerate(((0.1, 1.0), (0.2, 3.0), (0.3, 2.0)))]
    fallen = made.point(0.6, 9.0, "b3", has_collapsed=True)
    one, none = outcomes(said, [*runs, fallen, made.point(0.9, 2.0, correction="TIS")])
    assert (one.loss, one.found_dose, one.num_runs, one.num_collapsed) == (pytest.approx(0.2), 2.0, 4, 1)
    assert one.error == pytest.approx(-0.05) and one.high - one.loss == pytest.approx(4.302653 * 0.1 / 3**0.5)
    assert none.num_runs == 0 and math.isnan(none.loss)
    page = outcome_page(SAID, [one, none])
    assert (
        "root mean square error 0.050, mean error -0.050" in page and "to predict no loss at all errs by 0.200" in page
    )
    assert "1 of 1 lie in the interval" in page and "| int4 | none | 2 | 2 | +0.250 | +0.200 [" in page
    assert "| -0.050 | 4, 1 collapsed |" in page and "1 further predictions have no run yet" in page
    (int3,) = outcomes(said[1:], [made.point(0.6, 9.0, precision="int3", has_collapsed=True)])
    told = outcome_page(SAID, [one, int3])
    assert "Not scored, since every run collapsed: int3 none (1)." in told and "further predictions" not in told
    with pytest.raises(ValueError, match="no prediction for twelve has a run that did not collapse"):
        outcome_page(SAID, [none, int3])


def test_a_prediction_is_held_against_its_own_runs_alone() -> None:
    """Rows that name runs: two lengths of one arm, and a run of it that was there before."""
    runs = [made.point(0.1, 1.0, run_id="a"), made.point(0.3, 3.0, run_id="b"), made.point(0.9, 9.0, run_id="early")]
    arm = {"precision": "int4", "correction": "none"}
    said = [arm | {"length": 8, "dose": 1.0, "loss": 0.1, "runs": ["a", "later"]},
            arm | {"length": 16, "dose": 2.0, "loss": 0.2, "runs": ["b"]}]  # fmt: skip
    assert [(o.loss, o.num_runs) for o in outcomes(said, runs)] == [(0.1, 1), (0.3, 1)]
    page = outcome_page({"sweep": "twelve", "doses_of": "earlier"}, outcomes(said, runs))
    assert "int4, n=8 | none" in page and "int4, n=16 | none" in page and "0 of 0 lie in" in page
    assert "the uncorrected runs of `earlier`" in page and "+0.100 | +0.100 | +0.000 | 1 |" in page


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
    told, (one,) = read_outcomes(fine, "late")
    assert told == said and one.loss == pytest.approx(0.15) and one.error == pytest.approx(0.05) and one.num_runs == 2


def git(*words: str) -> str | None:
    """Output of git; None where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def test_committed_predictions_were_committed_before_their_runs() -> None:
    """Every packed run with a prediction was made by code whose history has the prediction, as it still is."""
    if git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("not a whole checkout of git")
    judged = dict[str, int]()
    for path in sorted((ROOT / "results" / "predictions").glob("*.json")):
        packed = packed_path(ROOT / "results", path.stem)
        commits = (git("log", "--format=%H", "--", str(path)) or "").split()
        assert len(commits) == 1, f"{path.name}: committed once and never changed"
        if not packed.is_file():
            continue
        ids = predicted_runs(json.loads(path.read_bytes()))
        runs = [run for run in read_packed(packed) if ids is None or run.run_id in ids]
        made_by = {run.commit for run in runs}
        judged[path.stem] = len(runs)
        late = [c for c in made_by if c is None or git("merge-base", "--is-ancestor", commits[0], c) is None]
        assert not late, f"{path.stem}: runs of {late} do not have the prediction of {commits[0]} behind them"
    assert judged["dose"] == 39
