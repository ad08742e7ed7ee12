"""A sweep's file as reports read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.records.looks import level_of
from harness.records.stats.decisions import ALPHA
from harness.records.stats.looks import level_per_look
from harness.records.sweep_file import Expectation, Purpose, Until, keep_purpose, purpose


def test_the_endpoints_of_a_report_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("question: x\nendpoints: [deployed]\narms: [{method: bf16}]\nseeds: [0]\n")
    assert purpose("one", tmp_path, tmp_path).endpoints == ("deployed",)
    assert purpose("none", tmp_path, tmp_path).endpoints == ("reference", "deployed")
    assert purpose("paper_fp16", tmp_path).control == "bf16_train"
    assert purpose("paper_qurl", tmp_path).question.startswith("Do ACR")
    (tmp_path / "wrong.yaml").write_text("endpoints: [rolled]\n")
    with pytest.raises(ValueError, match=r"wrong\.yaml: endpoints\.0='rolled': "):
        purpose("wrong", tmp_path, tmp_path)


def test_a_purpose_is_kept_where_the_file_does_not_tell_it(tmp_path: Path) -> None:
    results, kept = tmp_path / "results", tmp_path / "results" / "runs" / "mine" / "purpose.yaml"
    expected = Expectation(text="int4 is worse", score="auc", low="naive int4", high="bf16 bf16")
    meant = Purpose(question="Does it?", control="fp16", endpoints=("deployed",), expectations=(expected,))
    keep_purpose("mine", meant, results, tmp_path)
    assert kept.is_file() and purpose("mine", results, tmp_path) == meant
    (tmp_path / "mine.yaml").write_text("question: Another?\n")
    assert purpose("mine", results, tmp_path) == meant  # what ran, not what bears its name
    keep_purpose("mine", Purpose(question="Another?"), results, tmp_path)
    assert not kept.exists() and purpose("mine", results, tmp_path).question == "Another?"


def test_the_sizes_of_looks() -> None:
    assert Until(max_seeds=6).sizes == (3, 4, 5, 6)
    assert Until(max_seeds=10, batch=3).sizes == (3, 6, 9, 10)
    assert Until(max_seeds=9, batch=3).sizes == (3, 6, 9) and Until(max_seeds=3).sizes == (3,)
    with pytest.raises(ValueError, match="first=5: more than max_seeds=4"):
        Until(max_seeds=4, first=5)


def test_a_sweep_that_was_read_before_runs_were_added_is_judged_at_the_level_of_a_look(tmp_path: Path) -> None:
    assert (
        level_of(tmp_path, "main_wordmath")
        == level_per_look((6, 10, 11, 12, 13), ALPHA)
        == pytest.approx(0.01363, abs=1e-5)
    )
    assert level_of(tmp_path, "length_wordmath") == level_of(tmp_path, "none") == ALPHA
    keep_purpose("mine", Purpose(looks=(3, 5)), tmp_path, tmp_path)
    assert level_of(tmp_path, "mine") == level_per_look((3, 5), ALPHA)
    for sizes in ([6, 6], [6, 5], [0, 3]):
        (tmp_path / "wrong.yaml").write_text(f"looks: {sizes}\n")
        with pytest.raises(ValueError) as error:
            purpose("wrong", tmp_path, tmp_path)
        assert str(error.value) == (
            f"{tmp_path / 'wrong.yaml'}: looks: numbers of seeds or bases that rise from at least 1 are expected"
        )
