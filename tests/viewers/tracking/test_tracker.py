"""The door to trackers: what a tracker is told of a cell, in which order, and what becomes of its errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from harness.records.run_result import RunResult
from harness.viewers.tracking import facts
from harness.viewers.tracking.facts import Point
from harness.viewers.tracking.tracker import cell_key, log_cell, log_cells
from tests.viewers.cases import add

DOWN = ConnectionError("the line\nis down")


def recorder(told: list[Any], fails_at: str = "", error: Exception = DOWN) -> Any:
    """A tracker that keeps what it is told and knows what it was told before; it fails at one word where asked to."""
    keys: set[str] = set()
    tracker = SimpleNamespace(name="list", max_points=3, is_on=True, outages=lambda: (ConnectionError,))

    def note(word: str, *values: Any) -> None:
        told.append((word, *values))
        if word == fails_at:
            raise error

    def start(cell: Any) -> Any:
        if cell.key in keys:
            return None
        note("start", cell)
        return SimpleNamespace(
            params=lambda values: note("params", values),
            series=lambda points, axis="step": note("series", points, axis),
            artifact=lambda path: note("artifact", path),
            end=lambda: (note("end"), keys.add(cell.key)),
        )

    def give_up(error: BaseException) -> None:
        tracker.is_on = False
        told.append(("off", str(error)))

    tracker.start, tracker.give_up = start, give_up
    return tracker


def folder_of(results: Path) -> Path:
    return results / "runs" / "quick"


def cell(results: Path, **values: Any) -> RunResult:
    return add(results, "naive", "int4", **values)


def test_a_cell_is_told_once_and_in_order(tmp_path: Path) -> None:
    result, told = cell(tmp_path), list[Any]()
    tracker, path = recorder(told), folder_of(tmp_path) / f"{result.run_id}.json"
    samples = [Point("system/cell_threads", 2.0, 5, 0)]
    told_of = {"label": "the arm", "tags": {"trial": "7"}, "samples": samples}
    assert log_cell(tracker, "quick", result, folder_of(tmp_path), **told_of) == 1
    (_, opened), params, series, live, *artifacts, end = told
    assert opened.key == f"quick/{result.run_id}@{crc32(path.read_bytes()):08x}" == cell_key("quick", path)
    assert (opened.arm, opened.tags["arm"], opened.tags["trial"]) == ("the arm", "the arm", "7")
    assert opened.tags["system_metrics"] == facts.LIVE and opened.end_ms - opened.start_ms == 19_000
    assert params == ("params", facts.cell_params(result)) and end == ("end",)
    assert {p.step for p in series[1] if p.name == "reward/mean"} == {16, 33, 50}  # at most the 3 that it takes
    assert live == ("series", samples, "sample") and series[2] == "step"
    assert artifacts == [("artifact", path), ("artifact", path.with_suffix(".parquet"))]
    assert log_cell(tracker, "quick", result, folder_of(tmp_path)) == 0 and len(told) == 7


def test_a_cell_without_label_samples_or_series(tmp_path: Path) -> None:
    result, told = cell(tmp_path), list[Any]()
    path = folder_of(tmp_path) / f"{result.run_id}.json"
    path.with_suffix(".parquet").unlink()
    assert log_cell(recorder(told), "quick", result, folder_of(tmp_path)) == 1
    assert told[0][1].arm == "naive int4 s n=8" and told[0][1].tags["system_metrics"] == facts.REBUILT
    assert [word for word, *_ in told] == ["start", "params", "series", "artifact", "end"]


@pytest.mark.parametrize("word", ["start", "params", "series", "artifact", "end"])
def test_an_outage_anywhere_switches_off_and_the_cell_is_not_known(tmp_path: Path, word: str) -> None:
    result, told = cell(tmp_path), list[Any]()
    tracker = recorder(told, word)
    assert log_cell(tracker, "quick", result, folder_of(tmp_path)) == 0
    assert told[-1] == ("off", str(DOWN)) and told[-2][0] == word
    told.clear()
    assert log_cell(tracker, "quick", result, folder_of(tmp_path)) == 0 and told == []


def test_a_record_that_cannot_be_logged_is_left_alone_and_others_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn, whole, told = cell(tmp_path), cell(tmp_path, seed=1), list[Any]()
    (folder_of(tmp_path) / f"{torn.run_id}.parquet").write_bytes(b"PAR1 and no more")
    labels = {run.run_id: f"arm of {run.seed}" for run in (torn, whole)}
    tracker = recorder(told)
    assert log_cells(tracker, "quick", [torn, whole], folder_of(tmp_path), labels, {whole.run_id: {"trial": "1"}}) == 1
    assert [entry[1].arm for entry in told if entry[0] == "start"] == ["arm of 1"] and tracker.is_on
    assert f"warning: left alone: {folder_of(tmp_path) / torn.run_id}.parquet" in capsys.readouterr().err


def test_an_error_that_is_no_outage_travels(tmp_path: Path) -> None:
    tracker = recorder([], "params", KeyError("ours"))
    with pytest.raises(KeyError, match="ours"):
        log_cell(tracker, "quick", cell(tmp_path), folder_of(tmp_path))
