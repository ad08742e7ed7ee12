"""Accuracy by word problems: each standing by its rule, for both deployments, and the committed tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.studies.advise.accuracy import accuracy, control, corrections, read_tables
from tests.studies.advise.made import RESULTS, question, tables, write_tables


def test_the_evidence_has_its_lengths_and_the_range_of_k3_of_its_own_bases() -> None:
    found = tables()
    assert set(found) == {"bf16", "rollout"} and found["bf16"].tokens == {10: 240, 30: 740}
    assert found["bf16"].k3["int8"] == (pytest.approx(1e-4 / 30), pytest.approx(2e-4))
    assert found["bf16"].k3["bf16"] == (8e-6, 3e-5) and "nvfp4" not in found["bf16"].k3


@pytest.mark.parametrize(
    ("precision", "correction", "standing", "cells"),
    [
        ("fp8_block", "none", "held", ("equal, falls ≤39%", "equal, falls ≤39%")),
        ("int8", "TIS", "held", ("equal, falls ≤39%", "better")),
        ("fp8_block+kv8", "TIS", "undecided", ("equal, falls ≤39%", "not run")),
        ("fp8_block+kv8", "none", "undecided", ("equal, falls ≤39%", "cannot tell (+8)")),
        ("nvfp4", "TIS", "undecided", ("not run", "not run")),
        ("int8", "none", "lost", ("below on 6/6", "worse")),
        ("int4", "none", "lost", ("equal, falls ≤39%", "falls 1/6")),
        ("int4", "TIS", "lost", ("equal, falls ≤39%", "lower on 1/6 bases")),
        ("int4", "IcePop", "undecided", ("not run", "equal, falls ≤39%")),
    ],
)
def test_each_standing_has_its_rule(precision: str, correction: str, standing: str, cells: tuple[str, ...]) -> None:
    found = accuracy(tables()["bf16"], question(), precision, correction)
    assert (found.standing, found.cells) == (standing, cells)


def test_a_third_correction_is_asked_about_where_it_ran() -> None:
    assert corrections(tables()["bf16"], "int4") == ["none", "TIS", "IcePop"]
    assert corrections(tables()["bf16"], "int8") == corrections(tables()["bf16"], "nvfp4") == ["none", "TIS"]


def test_the_deployed_policy_has_its_own_verdicts() -> None:
    found = accuracy(tables()["rollout"], question(), "fp8_block+kv8", "none")
    assert (found.standing, found.cells[0]) == ("lost", "worse")


def test_a_mismatch_beyond_that_of_the_bases_is_told_where_no_loss_is_known() -> None:
    within, beyond = (accuracy(tables()["bf16"], question(k3), "fp8_block", "TIS") for k3 in (1.9e-4, 2.1e-4))
    assert (within.standing, beyond.standing) == ("held", "beyond") and within.cells == beyond.cells
    assert accuracy(tables()["bf16"], question(1.0), "int8", "none").standing == "lost"
    assert accuracy(tables()["bf16"], question(1.0), "nvfp4", "none").standing == "undecided"
    assert beyond.k3 == "3e-6 to 2e-4" and beyond.words == (
        "240 tokens: -0.010 [-0.02, +0.01] (flashrl, 6 runs, collapsed 0 of 6: at most 39 %); "
        "740 tokens: -0.010 [-0.02, +0.01] (flashrl, 6 runs, collapsed 0 of 6: at most 39 %); "
        "k3 0.00021 (made), those bases have 3e-6 to 2e-4"
    )


def test_without_a_mismatch_the_probe_is_named() -> None:
    found = accuracy(tables()["bf16"], question(), "nvfp4", "TIS")
    assert found.k3 == "-" and found.words == (
        "240 tokens: not run; 740 tokens: not run; no k3 is given for nvfp4; lowbit probe measures it"
    )


def test_the_control_shows_its_own_collapses() -> None:
    found = control(tables()["bf16"])
    assert (found.standing, found.cells, found.k3) == ("held", ("falls 0/6", "falls 0/6"), "8e-6 to 3e-5")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"main_wordmath\.csv: there is no such table"):
        read_tables(tmp_path)
    write_tables(tmp_path)
    (tmp_path / "tables" / "mismatch.csv").unlink()
    with pytest.raises(ValueError, match=r"mismatch\.csv: there is no such table"):
        read_tables(tmp_path)


def test_two_rows_of_one_setting_are_refused(tmp_path: Path) -> None:
    write_tables(tmp_path)
    path = tmp_path / "tables" / "main_wordmath.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, lines[1]]), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{path}: two rows without a variant of one method, format and length$"):
        read_tables(tmp_path)


def test_the_committed_tables_are_read() -> None:
    found = read_tables(RESULTS)["bf16"]
    assert list(found.tokens) == [10, 30] and set(found.k3) >= {"bf16", "fp8_block", "int8", "nvfp4", "int4"}
    assert accuracy(found, question(), "fp8_block", "TIS").standing == "held"
    assert accuracy(found, question(), "nvfp4", "none").standing == "lost"
