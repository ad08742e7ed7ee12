"""Titles of figures, by hand on small boards and curves."""

from __future__ import annotations

import math

import numpy as np

from harness.records.arms import group_arms
from harness.report.plots.bands import Band
from harness.report.plots.titles import largest_title, panel_title, score_words, scores_title, slope_title
from tests.result_factory import result

ARMS = group_arms([result(method, precision)[0] for method, precision in (("bf16", "bf16"), ("naive", "int4"))])
CONTROL, NAIVE = (next(arm for arm in ARMS if arm.method == method) for method in ("bf16", "naive"))


def board(verdict: str, *, seeds: int = 5, difference: float = -0.21) -> dict[str, dict[str, object]]:
    row = {"difference": difference, "deployed_difference": -0.1, "verdict": verdict, "deployed_verdict": "worse",
           "seeds": seeds, "is_preliminary": seeds < 3, "control": CONTROL.label, "variant": ""}  # fmt: skip
    return {NAIVE.label: row, CONTROL.label: {**row, "difference": math.nan, "deployed_difference": math.nan}}


def band(*values: float) -> Band:
    y = np.array(values)
    return Band(x=np.arange(1.0, len(y) + 1), middle=y, low=y, high=y)


def test_a_panel_says_what_its_uncorrected_arm_loses() -> None:
    found = panel_title("int4", [NAIVE], board=board("collapses in 2 of 3"), site="reference")
    assert found == "int4\nnaive -0.21: falls 2/3"
    assert panel_title("int4", [NAIVE], board=board("x"), site="rollout") == "int4\nnaive -0.10: worse"
    assert panel_title("int4", [NAIVE], board=board("worse", seeds=1), site="reference") == "int4\nnaive -0.21: 1 seed"
    assert panel_title("bf16", [CONTROL], board=board("worse"), site="reference") == "bf16"
    single = {"deployed_verdict": "cannot tell", "deployed_bases": 3, "deployed_bases_lower": 2}
    rows = {name: row | single for name, row in board("worse").items()}
    assert panel_title("int4", [NAIVE], board=rows, site="rollout") == "int4\nnaive -0.10: lower on 2/3 bases"


def test_runs_that_were_evaluated_at_their_end_alone_have_no_mean_over_training() -> None:
    run, _ = result()
    ends = {0, max(e.step for e in run.evals)}
    at_the_end = run.model_copy(update={"evals": [e for e in run.evals if e.step in ends]})
    assert score_words(group_arms([run])) == "mean accuracy during training"
    assert score_words(group_arms([at_the_end])) == "accuracy at the end"
    arms = group_arms([at_the_end, result("naive", "int4")[0]])
    assert score_words(arms) == "accuracy at the end, or its mean during training,"


def test_verdicts_are_counted() -> None:
    assert scores_title(ARMS, board("worse"), "bf16") == "Of 1 arm: 1 worse than bf16"
    assert scores_title(ARMS, board("collapses in 2 of 3"), "bf16") == "Of 1 arm: 1 with runs that collapse"
    assert scores_title(ARMS, board("cannot tell"), "bf16") == "Of 1 arm: none decided"
    assert scores_title(ARMS, board("worse", seeds=2), "bf16") == "Fewer than 3 seeds: nothing is decided against bf16"
    assert scores_title([CONTROL], board("worse"), "bf16") == "No arm has a control to be compared with"


def test_an_arm_whose_mean_is_open_tells_on_how_many_bases_it_is_lower() -> None:
    arms = group_arms([
        result(method, precision)[0]
        for method, precision in (("bf16", "bf16"), ("naive", "int4"), ("naive", "int8"), ("flashrl", "int8"))
    ])  # fmt: skip
    row = {**board("equal")[NAIVE.label], "bases": 6}
    rows = {arm.label: dict(row) for arm in arms}
    rows[CONTROL.label]["difference"] = math.nan
    rows["naive int8"] |= {"verdict": "cannot tell", "bases_lower": 2.0}
    assert scores_title(arms, rows, "bf16") == "Of 3 arms: 2 equal to bf16, 1 lower on 2 of 6 bases"
    signs = {"bases_below": 12.0, "bases": 12.0, "p_below": 0.01}
    assert scores_title(arms, rows | {"naive int8": rows["naive int8"] | signs}, "bf16") == (
        "Of 3 arms: 2 equal to bf16, 1 below on 12 of 12 bases, by 0.03 and more on 2"
    )
    rows["naive int4"] |= {"verdict": "cannot tell", "bases_lower": 0.0}
    assert scores_title(arms, rows, "bf16") == "Of 3 arms: 1 equal to bf16, 1 lower on 2 of 6 bases; 1 undecided"
    rows["naive int4"] |= {"bases_lower": 1.0}
    assert scores_title(arms, rows, "bf16") == "Of 3 arms: 1 equal to bf16, 2 lower or below on some bases"


def test_a_sweep_whose_control_has_variants_compares_each_with_its_own() -> None:
    arms = group_arms([
        result(method, precision, algo__staleness=age)[0]
        for method, precision in (("bf16", "bf16"), ("naive", "int4")) for age in (4, 16)
    ])  # fmt: skip
    naive, control = ([arm for arm in arms if arm.method == method] for method in ("naive", "bf16"))
    rows = {arm.label: board("worse")[CONTROL.label] | {"variant": arm.variant} for arm in control}
    for arm, own in zip(naive, control, strict=True):
        rows[arm.label] = board("better")[NAIVE.label] | {"control": own.label}
    assert scores_title(arms, rows, "bf16") == "Of 2 arms: 2 better than their control"


def test_the_largest_curve_and_its_slope() -> None:
    bands = {"bf16 bf16": band(1, 1, 1), "naive int4": band(2, 4, 8), "flashrl int4": band(2, 2, np.nan)}
    assert largest_title(bands, words="k3", control="bf16") == "k3 is largest for naive int4: 4, 4 times that of bf16"
    far = {"bf16 bf16": band(3, 3, 3), "naive int4": band(50000, 50000, 50000)}
    assert largest_title(far, words="k3", control="bf16") == (
        "k3 is largest for naive int4: 50,000, 16,700 times that of bf16"
    )
    assert slope_title(bands, words="k3", control="bf16") == (
        "k3: 1 to 2.7 times as large in the second half of the axis"
    )
    del bands["flashrl int4"]
    assert slope_title(bands, words="k3", control="bf16") == "k3: 2.7 times as large in the second half of the axis"
    assert largest_title({}, words="k3", control="bf16") == slope_title({}, words="k3", control="bf16") == ""
