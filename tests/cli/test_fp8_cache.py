"""`lowbit fp8-cache` and `lowbit mismatch`: files of committed records, and wrong input in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.main import main
from harness.foundation.project_files import HOME

BASE = HOME / "results" / "bases" / "xs128-sort4-b0-a15cf79e106f"


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fp8-cache", str(BASE), "task=sort", "task.n=4", "--name", "small", "--answers", "4", "--write"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    assert "where keys alone are rounded" in capsys.readouterr().out
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()} == {
        "fp8_cache/small.json", "tables/fp8_cache.md", "figures/fp8_cache.png"
    }  # fmt: skip


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.studies.fp8_cache.record.compare", lambda *given, **kept: pytest.fail("it measures"))
    (tmp_path / "fp8_cache").touch()
    assert main(["fp8-cache", str(BASE), "task=sort", "task.n=4", "--results", str(tmp_path)]) == 2
    assert f"--results {tmp_path / 'fp8_cache'}: nothing can be written there: File" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fp8-cache", "nowhere"], "nowhere: no such folder; a model's, with its config.json, is expected"),
        (["fp8-cache", str(BASE), "--accuracy", "64"], "'64': questions x answers are expected, such as 64x4"),
        (["fp8-cache", str(BASE), "task=wordmath", "task.n=4"], "task 'wordmath' is written in token ids of models"),
        (["fp8-cache", str(BASE), "--first-load", "nowhere"], "nowhere: no such folder"),
        (["fp8-cache", str(BASE), "trainer.compute=bf16"], "trainer.compute=bf16: has no effect here, where the exact"),
        (
            ["fp8-cache", str(BASE), "precision=int8", "method=naive"],
            "policy answers each question once, on the CPU; valid: task; ",
        ),
        (["fp8-cache", str(BASE), "base.n=3"], "base.n=3: no base is trained here"),
        (["fp8-cache", str(BASE), "--name", "a/b"], "argument --name: 'a/b': a name without a folder is expected"),
        (["fp8-cache", "--scan"], "--scan: nothing is measured without a model folder; name one"),
        (["fp8-cache", "--first-load", "x"], "--first-load: nothing is measured without a model folder"),
        (["fp8-cache"], "no record yet; give a model folder to measure"),
        (["mismatch"], "none of main_wordmath"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
