"""`lowbit layers`: what it writes, and wrong input in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.main import main
from harness.foundation.project_files import HOME
from harness.studies.layers.report import LEGEND, page, read_all, row_named, worst

BASE = HOME / "results" / "bases" / "xs128-sort4-b0-a15cf79e106f"


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layers", str(BASE), "task=sort", "task.n=4", "--name", "small", "--answers", "4", "--write"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    assert f"{BASE.name}, int8: " in capsys.readouterr().out
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()} == {
        "layers/small.json", "tables/layers.md"
    }  # fmt: skip
    [record] = read_all(tmp_path)
    alone = [row["k3"] for row in record["rows"][:-2]]
    assert len(alone) == 8 and worst(record)["k3"] == max(alone)
    assert row_named(record, "all but the worst")["k3"] < row_named(record, "all")["k3"]
    assert main([*words[:4], "--answers", "3", "--name", "second", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(f"{BASE.name}, int8: ") == 1, "what was measured, without earlier records"
    assert main(["layers", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{BASE.name}, int8: ") == 2 and f"\n\n{LEGEND}\n\n- " in out
    assert "task sort n=4, " in page([record]) and "task sort, " in page([record | {"n": None}])


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.studies.layers.report.compare", lambda *given, **kept: pytest.fail("it measures"))
    (tmp_path / "layers").touch()
    assert main(["layers", str(BASE), "task=sort", "task.n=4", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"lowbit: error: --results {tmp_path / 'layers'}: nothing can be written there: File exists\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layers", "nowhere"], "nowhere: no such folder; a model's, with its config.json, is expected"),
        (["layers", str(BASE), "task=wordmath", "task.n=4"], "task 'wordmath' is written in token ids of models"),
        (["layers", str(BASE), "task=sort", "task.n=4", "precision=bf16"], "precision=bf16: method naive cannot"),
        (["layers", str(BASE), "trainer.device=cuda"], "trainer.device=cuda: has no effect here, where the exact"),
        (["layers", str(BASE), "--name", "a/b"], "argument --name: 'a/b': a name without a folder is expected"),
        (["layers", "--answers", "5"], "--answers: nothing is measured without a model folder; name one"),
        (["layers"], "no record yet; give a model folder to measure"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_the_committed_page_is_that_of_the_committed_records() -> None:
    results = HOME / "results"
    assert (results / "tables" / "layers.md").read_text(encoding="utf-8") == page(read_all(results))
