"""Result files: strict JSON, exact round trips, atomic writes, and errors that name the file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from harness.cli.passport import find_run
from harness.records.run_result import (
    EvalRecord,
    RunResult,
    import_results,
    read_result,
    read_results,
    read_series,
    summarise,
    verify,
    write_result,
)
from tests import result_factory as factory


def minimal(**changes) -> RunResult:
    fields = {"run_id": "a1", "name": "x", "sweep": "quick", "status": "ok", "config": {}, "method": {"name": "bf16"}}
    return RunResult(**{**fields, "seed": 0, "base_seed": 0, **changes})


def record(step: int, accuracy: float, site: str = "reference") -> EvalRecord:
    return EvalRecord(step=step, precision="fp32", site=site, accuracy=accuracy, question_hash="q")  # pyright: ignore


def test_a_result_reads_back_equal(tmp_path: Path) -> None:
    result, series = factory.result("flashrl", "int4", seed=3)
    path = write_result(tmp_path, result, series)
    assert read_result(path) == result
    back = read_series(tmp_path, result.run_id)
    assert list(back) == list(series[0])
    for column in series[0]:
        expected = torch.tensor([row[column] for row in series]).tolist()  # stored as float32
        assert back[column] == expected


def test_a_file_from_before_the_launch_was_recorded_still_reads(tmp_path: Path) -> None:
    path = write_result(tmp_path, minimal(), None)
    values = json.loads(path.read_text())
    later = ("launch", "trainer", "memory_gib")
    assert [values.pop(name) for name in later] == [{}, {}, {}]
    path.write_text(json.dumps(values))
    assert read_result(path) == minimal()
    told = minimal(launch={"packing": True}, trainer={"float32": 15}, memory_gib={"allocated": 1.5})
    assert read_result(write_result(tmp_path, told, None)) == told != minimal()


def test_json_is_what_every_parser_reads(tmp_path: Path) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    result = minimal(
        peak_memory_gib=math.inf,
        time_s={"generate": math.nan, "update": 1.5},
        summary={"auc": -math.inf},
        config={"knobs": {"MIS": {"high": math.inf, "bounds": (0.5, math.nan)}}},
    )
    text = write_result(tmp_path, result, None).read_text()
    values = json.loads(text, parse_constant=refuse)
    assert values["peak_memory_gib"] is None
    assert values["time_s"] == {"generate": None, "update": 1.5}
    assert values["summary"] == {"auc": None}
    assert values["config"] == {"knobs": {"MIS": {"high": "inf", "bounds": [0.5, "nan"]}}}
    assert values["schema_version"] == 1
    assert read_result(tmp_path / "a1.json") == result


def test_series_keeps_nonfinite_values_and_gaps(tmp_path: Path) -> None:
    rows = [{"a": 1.0, "p": [1.0, 2.0]}, {"a": math.inf, "b": 3.0}, {"a": math.nan, "p": []}]
    write_result(tmp_path, minimal(), rows)
    back = read_series(tmp_path, "a1")
    assert back["step"] == [0.0, 1.0, 2.0]
    assert back["a"][:2] == [1.0, math.inf] and math.isnan(back["a"][2])
    assert math.isnan(back["b"][0]) and back["b"][1] == 3.0
    assert back["p"] == [[1.0, 2.0], [], []]


def test_a_packed_sweep_is_no_folder_of_results(tmp_path: Path) -> None:
    (tmp_path / "quick.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"quick\.zip: no folder of results; harness\.records\.folder\.runs_of reads"):
        read_results(tmp_path / "quick.zip")
    assert read_results(tmp_path / "nowhere") == []


def test_pandas_reads_the_series(tmp_path: Path) -> None:
    write_result(tmp_path, minimal(), [{"a": 1.0, "p": [1.0, 2.0]}, {"a": 2.0, "p": [3.0]}])
    frame = pd.read_parquet(tmp_path / "a1.parquet")
    assert frame["a"].tolist() == [1.0, 2.0]
    assert [list(value) for value in frame["p"]] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"speed": 3}, "speed"),
        ({"status": "fine"}, "status"),
        ({"schema_version": 2}, "schema_version"),
        (
            {
                "evals": [
                    {
                        "step": 0,
                        "precision": "fp32",
                        "site": "reference",
                        "accuracy": 1.0,
                        "question_hash": "q",
                        "correct": [2],
                    }
                ]
            },
            "evals.0.correct.0",
        ),
        ({"method": {"name": "bf16", "colour": "red"}}, "method.colour"),
    ],
)
def test_the_schema_refuses(changes: dict, word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        minimal(**changes)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == word


def test_corrupt_files_are_named_with_a_reason(tmp_path: Path) -> None:
    good, series = factory.result()
    write_result(tmp_path, good, series)
    assert verify(tmp_path) == []
    whole = (tmp_path / f"{good.run_id}.json").read_text()
    (tmp_path / "cut.json").write_text(whole[:200])
    (tmp_path / "other.json").write_text(whole)
    (tmp_path / "key.json").write_text(whole.replace('"reason"', '"cause"'))
    (tmp_path / "orphan.parquet").write_bytes(b"PAR1")
    write_result(tmp_path, minimal(run_id="quiet", status="failed"), None)
    write_result(tmp_path, minimal(run_id="bare"), None)
    write_result(tmp_path, minimal(run_id="torn"), [{"a": 1.0}])
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "torn.parquet").read_bytes()[:-9])
    lines = {Path(line.split(":")[0]).name: line for line in verify(tmp_path)}
    assert set(lines) == {
        "cut.json",
        "other.json",
        "key.json",
        "orphan.parquet",
        "quiet.json",
        "bare.json",
        "torn.parquet",
    }
    assert "invalid JSON" in lines["cut.json"]
    assert good.run_id in lines["other.json"] and "'other'" in lines["other.json"]
    assert "cause" in lines["key.json"]
    assert "without a reason" in lines["quiet.json"]
    assert "series bare.parquet is missing" in lines["bare.json"]
    assert all("\n" not in line for line in lines.values())
    with pytest.raises(ValueError, match=r"cut\.json: not a result file"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match=r"gone\.json: cannot be read: No such file"):
        read_result(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"gone\.parquet: cannot be read"):
        read_series(tmp_path, "gone")


def test_damage_within_a_series_is_told_in_one_line(tmp_path: Path) -> None:
    """One bit of a number, a name that is no text, and the head of a page."""
    write_result(tmp_path, minimal(), [{"a": float(i), "some_name": 0.5} for i in range(200)])
    path = tmp_path / "a1.parquet"
    whole = path.read_bytes()
    assert verify(tmp_path) == []
    told: list[str] = []
    for place, value in ((600, whole[600] ^ 1), (whole.index(b"some_name"), 0xFF), (4, 0xFF)):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        told += verify(tmp_path)
    assert [line.removeprefix(f"{path}: ") for line in told] == [
        "cannot be read: could not verify page integrity, CRC checksum verification failed for page_ordinal 0",
        "not a Parquet file: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "cannot be read: Couldn't deserialize thrift: don't know what type: \x0f Deserializing page header failed.",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_result(tmp_path, minimal(num_steps=1), [{"a": 1.0}])
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.foundation.whole_file.os.fsync", full)
    with pytest.raises(ValueError, match=r"a1\.parquet: cannot be written: No space left on device"):
        write_result(tmp_path, minimal(num_steps=2), [{"a": 2.0}])
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a1.json", "a1.parquet"]
    assert read_series(tmp_path, "a1")["a"] == [1.0]


def test_a_file_in_place_of_the_folder_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match=r"a1\.json: cannot be written"):
        write_result(tmp_path / "runs" / "quick", minimal(), None)


def test_a_result_without_series_removes_the_stale_one(tmp_path: Path) -> None:
    write_result(tmp_path, minimal(), [{"a": 1.0}])
    write_result(tmp_path, minimal(status="failed", reason="killed"), None)
    assert [p.name for p in tmp_path.iterdir()] == ["a1.json"]


def test_import_merges_by_identical_id(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "runs"
    for index in range(3):
        write_result(source / "quick", minimal(run_id=f"r{index}"), [{"a": float(index)}])
    assert import_results(sorted(source.rglob("*.json")), destination) == (["r0", "r1", "r2"], [])
    assert import_results(sorted(source.rglob("*.json")), destination) == ([], ["r0", "r1", "r2"])
    assert read_series(destination / "quick", "r2")["a"] == [2.0]

    write_result(destination / "quick", minimal(run_id="r1", status="cancelled", reason="Ctrl-C"), None)
    assert import_results(sorted(source.rglob("*.json")), destination) == (["r1"], ["r0", "r2"])
    assert read_result(destination / "quick" / "r1.json").status == "ok"
    assert read_series(destination / "quick", "r1")["a"] == [1.0]

    write_result(tmp_path / "fourth", minimal(run_id="r1", status="cancelled", reason="Ctrl-C"), None)
    assert import_results((tmp_path / "fourth").rglob("*.json"), destination) == ([], ["r1"])
    assert read_result(destination / "quick" / "r1.json").status == "ok"  # what did not finish replaces no result

    write_result(destination / "other", minimal(run_id="r4", sweep="other", status="failed", reason="x"), [{"a": 1.0}])
    write_result(tmp_path / "third", minimal(run_id="r4", sweep="other", status="diverged", reason="y"), None)
    assert import_results((tmp_path / "third").rglob("*.json"), destination) == (["r4"], [])
    assert [path.name for path in (destination / "other").iterdir()] == ["r4.json"]  # no series of another attempt

    write_result(destination / "quick", minimal(run_id="r2", num_steps=5), [{"a": 9.0}])
    write_result(source / "quick", minimal(run_id="r3"), [{"a": 3.0}])
    with pytest.raises(ValueError, match="another result of quick/r2"):
        import_results(sorted(source.rglob("*.json")), destination)
    assert not (destination / "quick" / "r3.json").exists()


def test_of_two_files_of_one_run_the_finished_one_is_imported_and_two_finished_ones_are_refused(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "runs"
    for folder, values in (("a", {"status": "cancelled", "reason": "Ctrl-C"}), ("b", {}), ("c", {}), ("d", {})):
        write_result(source / folder, minimal(**values), [{"a": 1.0}])
    write_result(source / "d", minimal(status="failed", reason="x"), None)
    paths = sorted(source.rglob("*.json"))
    assert import_results(paths, destination) == (["a1"], ["a1", "a1"])
    assert read_result(destination / "quick" / "a1.json") == minimal()
    write_result(source / "c", minimal(num_steps=5), [{"a": 9.0}])
    with pytest.raises(ValueError) as caught:
        import_results(paths, tmp_path / "other")
    assert str(caught.value) == f"{tmp_path / 'other'}: another result of quick/a1 is there; remove one of the two"
    assert not (tmp_path / "other").exists()


def test_summary_by_hand() -> None:
    evals = [record(0, 0.4), record(40, 0.8), record(20, 0.6), record(40, 0.7, "rollout"), record(0, 0.1, "rollout")]
    rows = [
        {"reward/mean": float(i), "mismatch/kl_k3": k3, "train/grad_norm": g, "mismatch/ess_token": 1 - k3}
        for i, (k3, g) in enumerate([(0.1, 1.0), (0.5, math.nan), (0.2, 3.0), (0.3, 2.0), (0.4, 1.0), (0.1, math.inf)])
    ]
    summary = summarise(rows, evals)
    assert summary["auc"] == pytest.approx(0.7)
    assert (summary["base_accuracy"], summary["final_accuracy"]) == (0.4, 0.8)
    assert (summary["base_accuracy_rollout"], summary["final_accuracy_rollout"]) == (0.1, 0.7)
    assert summary["reward_last"] == 3.0  # mean of 1..5
    assert summary["k3_max"] == 0.5 and summary["k3_median"] == 0.25
    assert summary["ess_token_min"] == 0.5
    assert summary["grad_norm_max"] == 3.0 and summary["num_nonfinite"] == 2
    assert summary["entropy_last"] is None


def test_summary_of_a_run_that_never_started() -> None:
    summary = summarise([], [])
    assert {value for name, value in summary.items() if name != "num_nonfinite"} == {None}


def test_import_is_light() -> None:
    heavy = ("torch", "pandas", "mlflow", "pyarrow")
    code = f"import sys, harness.records.run_result; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_of_a_run_in_two_sweeps_the_finished_one_is_found(tmp_path: Path) -> None:
    waits = minimal(run_id="aa11", sweep="mine", status="cancelled", reason="to run again (--again)")
    write_result(tmp_path / "runs" / "mine", waits, None)
    write_result(tmp_path / "runs" / "other", minimal(run_id="aa11", sweep="other"), [{"a": 1.0}])
    assert find_run("aa11", tmp_path).sweep == "other"
    assert find_run("mine/aa11", tmp_path).status == "cancelled"
