"""`lowbit dose` on packed synthetic sweeps: the study, a prediction that stays held out, its outcome, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.cli.main import main
from harness.studies.dose.points import curve_points, read_all_points
from tests.studies.dose import made

FILE = """
question: What does a length lose that has not run?
overrides: [model=s, task=sort, task.n=12, trainer.steps=80]
arms:
  - {method: bf16}
  - {method: [naive, flashrl], precision: int4}
seeds: [0]
"""


def lowbit_dose(results: Path, *words: str) -> int:
    return main(["dose", *words, "--results", str(results)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return made.curved_sweep(tmp_path / "results")


def probe_file(folder: Path, **changes: Any) -> str:
    record = {
        "id": "abc", "folder": "base", "config": {
            "task": {"name": "sort", "n": 12}, "model": {"spread": 0.5}, "engine": {"name": "embedded"}},
        "formats": [{"precision": "int4", "mismatch": {"kl_k3": 0.1}, "length_mean": 10.0,
                     "passport": {"weights": {"int4_g32": 28}}}],
    } | changes  # fmt: skip
    path = folder / "probe.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return str(path)


def test_the_command_prints_and_writes(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lowbit_dose(results) == 0 and not (results / "tables").exists()
    printed = capsys.readouterr().out
    assert printed.startswith("- 0.1 of accuracy is lost without a correction at 0.") and "TIS bears " in printed
    assert lowbit_dose(results, "--write") == 0
    out = capsys.readouterr().out
    assert out.startswith(printed) and str(results / "figures" / "dose_curve.png") in out
    page = (results / "tables" / "dose_curve.md").read_text(encoding="utf-8")
    assert all(line in page for line in printed.splitlines())
    assert "64 runs of `sort` on 8 bases" in page and (results / "figures" / "dose_curve.png").stat().st_size > 10_000


def test_a_prediction_its_runs_and_its_outcome(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, probe = tmp_path / "twelve.yaml", probe_file(tmp_path)
    sweep.write_text(FILE, encoding="utf-8")
    assert lowbit_dose(results, "--predict", str(sweep), "--probe", probe) == 0
    said = json.loads((results / "predictions" / "twelve.json").read_bytes())
    assert {(row["precision"], row["correction"]): row["dose"] for row in said["predictions"]} == {
        ("int4", "none"): pytest.approx(1.0), ("int4", "TIS"): pytest.approx(1.0),
    }  # fmt: skip
    assert lowbit_dose(results, "--predict", str(sweep), "--probe", probe) == 2
    assert "predictions are made once" in capsys.readouterr().err
    before = lowbit_dose(results), capsys.readouterr().out
    (naive,), (flashrl,) = (row["runs"] for row in said["predictions"])
    own = {"model__name": "s", "task__n": 12, "started": "2099-01-01T00:00:00+00:00"}
    runs = [made.run("twelve", "bf16", "bf16", auc=0.7, **own),
            made.run("twelve", "naive", "int4", auc=0.2, k3=0.1, length=10.0, run_id=naive, **own),
            made.run("twelve", "flashrl", "int4", auc=0.6, k3=0.1, length=10.0, run_id=flashrl, **own)]  # fmt: skip
    made.keep(results, "twelve", runs)
    assert (lowbit_dose(results), capsys.readouterr().out) == before, "its runs are in no curve"
    assert lowbit_dose(results, "--outcome", "twelve", "--write") == 0
    page = (results / "tables" / "twelve_predictions.md").read_text(encoding="utf-8")
    assert page in capsys.readouterr().out and page.startswith("# Predictions for `twelve`, and what came")
    assert "| int4 | none | 1 | 1 |" in page and "| +0.500 |" in page and "| +0.100 |" in page


def test_runs_of_a_sweep_say_the_doses_of_another(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of the predicted sweep that are there before stay in the curve, and are not predicted."""
    sweep = tmp_path / "curved.yaml"
    sweep.write_text(FILE.replace("task.n=12", "task.n=8"), encoding="utf-8")
    before = lowbit_dose(results), capsys.readouterr().out
    assert lowbit_dose(results, "--predict", str(sweep), "--doses-of", "curved") == 0
    said = json.loads((results / "predictions" / "curved.json").read_bytes())
    wanted = ("none", "s", 8, "int4", False)
    doses = [
        p.dose for p in curve_points(read_all_points(results))
        if (p.correction, p.size, p.length, p.precision, p.has_collapsed) == wanted
    ]  # fmt: skip
    assert len(doses) > 1 and said["doses_of"] == "curved"
    assert [row["dose"] for row in said["predictions"]] == [pytest.approx(median(doses), rel=1e-5)] * 2
    capsys.readouterr()
    assert (lowbit_dose(results), capsys.readouterr().out) == before
    assert lowbit_dose(results, "--predict", str(sweep), "--doses-of", "nothing") == 2
    expected = "lowbit: error: dose --doses-of: no packed sweep 'nothing'; valid: curved\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--predict", "dose"), "dose: --predict SWEEP goes with one of --probe FILE and --doses-of SWEEP"),
        (
            ("--predict", "dose", "--probe", "x.json", "--write"),
            "--write: dose --predict always writes its predictions",
        ),
        (("--probe", "x.json"), "dose: --predict SWEEP goes with one of --probe FILE and --doses-of SWEEP"),
        (("--predict", "dose", "--probe", "x.json"), "error: cannot read x.json: No such file or directory; valid: a"),
        (("--predict", "dose", "--probe", "README.md"), "error: README.md is not valid JSON: Expecting value: line 1"),
        (("--predict", "dose", "--doses-of", "x"), "dose --doses-of: no packed sweep 'x'; valid: curved\n"),
        (("--outcome", "nothing"), "nothing.json is missing; predict first, then run the sweep and pack it"),
        (("--outcome", "x", "--predict", "dose"), "argument --predict: not allowed with argument --outcome"),
        (
            ("--outcome", "x", "--doses-of", "dose"),
            "dose: --predict SWEEP goes with one of --probe FILE and --doses-of",
        ),
        (("--nothing",), "dose: unknown arguments --nothing"),
    ],
)
def test_wrong_input(words: tuple[str, ...], expected: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lowbit_dose(results, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1 and expected in err
    assert not (results / "predictions").exists()


def test_an_unknown_sweep_and_an_empty_folder(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowbit_dose(results, "--predict", "dosee", "--probe", probe_file(tmp_path)) == 2
    assert "dosee" in capsys.readouterr().err and not (results / "predictions").exists()
    (tmp_path / "empty").mkdir()
    assert lowbit_dose(tmp_path / "empty") == 2
    assert "holds no run with a control; pack a sweep first" in capsys.readouterr().err
