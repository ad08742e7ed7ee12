"""The README's table: its numbers are the leaderboard's, its order that of the methods, and nothing is left unsaid."""

from __future__ import annotations

import pytest

from harness.records.run_result import RunResult
from harness.report.leaderboard import contrasts, leaderboard
from harness.report.main_table import main_table
from tests import arm_factory


def results() -> list[RunResult]:
    made = [
        [
            arm_factory.run("main", method, precision, auc=auc + 0.01 * (seed == place % 3), seeds=3, task__n=n)[seed]
            for seed in range(3)
        ]
        for n in (8, 16)
        for place, (method, precision, auc) in enumerate((
            ("flashrl", "int4", 0.6), ("naive", "int4", 0.5), ("bf16", "bf16", 0.7), ("naive", "int8", 0.69),
            ("qurl", "int8", 0.7),
        ))
    ]  # fmt: skip
    made += [arm_factory.run("main", "fp16", "fp16", auc=0.71, seeds=3, task__n=8)]
    made += [arm_factory.run("main", "mis", "int8", auc=0.71, seeds=1, task__n=8)]
    return [result for arm in made for result, _ in arm]


def test_rows_are_arms_in_order_and_cells_the_leaderboards_numbers() -> None:
    found = results()
    text = main_table(found)
    heads = "| method | rollouts | accuracy | against bf16 | as deployed | against naive | collapsed | k3 |"
    short, long = text.split("n=16:")
    assert short.startswith(f"n=8:\n\n{heads}\n") and long.startswith(f"\n\n{heads}\n")
    split = {
        name: [line.strip("| ").split(" | ") for line in part.splitlines()[4:] if "|" in line]
        for name, part in (("short", short), ("long", f"n=16:{long}"))
    }
    rows = {(name, row[0], row[1]): row[2:] for name, found_rows in split.items() for row in found_rows}
    order = [("bf16", "bf16"), ("naive", "int8"), ("naive", "int4"), ("flashrl", "int4"), ("qurl", "int8")]
    assert list(rows) == [("short", *pair) for pair in [*order[:3], ("fp16", "fp16"), *order[3:]]] + [
        ("long", *pair) for pair in order
    ]
    own = {row["arm"]: row for row in leaderboard(found).to_dict("records")}["flashrl int4 n=16"]
    plain = {row["arm"]: row for row in contrasts(found).to_dict("records")}["flashrl int4 n=16"]
    accuracy, control, deployed, naive, collapsed, _ = rows["long", "flashrl", "int4"]
    assert accuracy.startswith(f"{own['accuracy']:.3f} [") and collapsed == own["collapse"]
    assert deployed.startswith(f"{own['deployed_difference']:+.3f} [") and own["deployed_verdict"] in deployed
    assert control.startswith(f"{own['difference']:+.3f} [") and own["verdict"] in control
    assert naive.startswith(f"{plain['difference']:+.3f}") and plain["verdict"] in naive and plain["difference"] > 0
    assert rows["short", "bf16", "bf16"][1] == "control" and rows["long", "naive", "int4"][3] == "-"
    assert text.splitlines()[-1] == "1 arms with fewer than 3 seeds are left out."


def test_without_its_control_there_is_no_table() -> None:
    with pytest.raises(ValueError, match="no result of the control 'bf16'"):
        main_table([run for run in results() if run.method.name != "bf16"])
    with pytest.raises(ValueError, match="no result of the control"):
        main_table([])
