"""The README's table: its numbers are the leaderboard's, its order that of the methods, and nothing is left unsaid."""

from __future__ import annotations

import pytest

from harness.leaderboard import contrasts, leaderboard
from harness.main_table import main_table
from harness.results import RunResult
from tests import arm_factory


def results() -> list[RunResult]:
    made = [
        arm_factory.run("main", method, precision, auc=auc, seeds=3, task__n=n)
        for n in (8, 16)
        for method, precision, auc in (
            ("flashrl", "int4", 0.6), ("naive", "int4", 0.5), ("bf16", "bf16", 0.7), ("naive", "int8", 0.69),
            ("qurl", "int8", 0.7),
        )
    ]  # fmt: skip
    made += [arm_factory.run("main", "fp16", "fp16", auc=0.71, seeds=1, task__n=8)]
    return [result for arm in made for result, _ in arm]


def test_rows_are_arms_in_order_and_cells_the_leaderboards_numbers() -> None:
    found = results()
    lines = main_table(found).splitlines()
    heads = [word.strip() for word in lines[0].strip("|").split("|")]
    assert heads[2:6] == ["accuracy, n=8", "against bf16, n=8", "against naive, n=8", "k3, n=8"] and len(heads) == 10
    split = [line.strip("| ").split(" | ") for line in lines[2:] if "|" in line]
    rows = {(row[0], row[1]): row for row in split}
    assert list(rows) == [
        ("bf16", "bf16"), ("naive", "int8"), ("naive", "int4"), ("fp16*", "fp16"), ("flashrl", "int4"),
        ("qurl", "int8"),
    ]  # fmt: skip
    board = {row["arm"]: row for row in leaderboard(found).to_dict("records")}
    own = board["flashrl int4 n=16"]
    cells = rows["flashrl", "int4"][6:]
    assert cells[0].startswith(f"{own['accuracy']:.3f} [") and cells[1].startswith(f"{own['difference']:+.3f} [")
    assert own["verdict"] in cells[1]
    plain = {row["arm"]: row for row in contrasts(found).to_dict("records")}["flashrl int4 n=16"]
    assert (
        cells[2].startswith(f"{plain['difference']:+.3f}") and plain["verdict"] in cells[2] and plain["difference"] > 0
    )
    assert rows["bf16", "bf16"][3] == "control" and rows["naive", "int4"][4] == "-"
    assert rows["fp16*", "fp16"][6:] == ["-"] * 4  # not run at that length
    assert lines[-1] == "* preliminary, fewer than 3 seeds."


def test_without_its_control_there_is_no_table() -> None:
    with pytest.raises(ValueError, match="no result of the control 'bf16'"):
        main_table([run for run in results() if run.method.name != "bf16"])
    with pytest.raises(ValueError, match="no result of the control"):
        main_table([])
