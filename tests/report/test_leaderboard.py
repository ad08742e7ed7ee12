"""The leaderboard: numbers worked out by hand, pairing, failures, and verdicts that the truth supports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from harness.records import stats
from harness.records.arms import group_arms
from harness.records.run_result import Base, EvalRecord, RunResult
from harness.report import collapse_times
from harness.report.leaderboard import board_of, contrasts, contrasts_of, judge_arms, leaderboard
from harness.report.scores import by_base, components, score_arms
from harness.report.sentences import findings
from tests import result_factory as factory


def run(method: str, precision: str, seed: int, curve: list[list[int]], **changes: Any) -> RunResult:
    """A run with given answers per evaluation (steps 0, 20, 40) in the reference precision, all wrong as rolled."""
    status = changes.pop("status", "ok")
    question_hash = changes.pop("question_hash", "q")
    values = factory.config(method, precision, base_seed=seed, seed=seed, trainer__steps=40, trainer__eval_every=20)
    evals = [
        EvalRecord(
            step=20 * index,
            precision="fp32",
            site=site,  # pyright: ignore[reportArgumentType]
            accuracy=float(np.mean(answers)) if site == "reference" else 0.0,
            correct=answers if site == "reference" else [0] * len(answers),
            question_hash=question_hash,
        )
        for index, answers in enumerate(curve)
        for site in ("reference", "rollout")
    ]
    fields = {"name": "x", "sweep": "quick", "config": values, "method": {"name": method}, "status": status}
    fields |= {
        "seed": seed,
        "base_seed": seed,
        "evals": evals,
        "summary": {"reward_last": 0.5, "k3_max": [0.0, 0.1, 0.2, 0.3][seed]},
    }
    return RunResult.model_validate({"run_id": f"{method}{precision}{seed}", **fields, **changes})


def rows(board: pd.DataFrame) -> dict[str, dict[str, Any]]:
    return {str(row["arm"]): row for row in board.to_dict("records")}


def test_scores_by_hand() -> None:
    board = leaderboard(
        [
            run("bf16", "bf16", 0, [[0, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
            run("bf16", "bf16", 1, [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]),
            run("naive", "int4", 0, [[0, 0, 0, 1], [1, 0, 0, 0], [1, 1, 0, 0]]),
            run("naive", "int4", 1, [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]),
        ]
    )
    bf16, int4 = rows(board).values()
    assert bf16["accuracy"] == 0.875 and bf16["auc"] == pytest.approx((0.625 + 0.625) / 2)
    assert bf16["base_accuracy"] == 0.125
    assert int4["auc"] == pytest.approx((0.375 + 0.125) / 2)
    assert (int4["rollout_accuracy"], int4["reward"], int4["k3_max"]) == (0.0, 0.5, 0.1)
    expected = scipy_stats.ttest_rel([0.375, 0.125], [0.625, 0.625])
    assert int4["difference"] == pytest.approx(-0.375)
    assert int4["p"] == pytest.approx(expected.pvalue) and int4["p_adjusted"] == pytest.approx(expected.pvalue)
    assert (bf16["verdict"], int4["verdict"]) == ("control", "cannot tell")
    assert int4["is_preliminary"] and int4["control"] == "bf16 bf16"
    assert bf16["accuracy_low"] <= 0.875 <= bf16["accuracy_high"] <= 1


def test_what_the_control_is_beaten_by_hand() -> None:
    """P(better), answers won and lost, and the interval over seeds and questions, from six answers per run."""
    board = rows(leaderboard([
        run("bf16", "bf16", 0, [[0, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        run("bf16", "bf16", 1, [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),
        run("naive", "int4", 0, [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 1]]),
        run("naive", "int4", 1, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ]))  # fmt: skip
    row = board["naive int4"]
    assert row["improvement"] == 0.25  # 0.375 beats 0.25 and not 0.625; 0 beats neither
    assert 0 <= row["improvement_low"] < 0.25 < row["improvement_high"] <= 1
    assert (row["wins"], row["losses"], row["p_mcnemar"]) == (1, 3, pytest.approx(0.625))
    want = stats.crossed(np.array([[0.5, 0.5, 0, 0.5], [0, 0, 0, 0]]), np.array([[1, 1, 0.5, 0], [1, 0, 0, 0]]))
    assert (row["crossed_low"], row["crossed_high"]) == pytest.approx((want.low, want.high))
    assert math.isnan(row["p_equal"]) and row["verdict"] == "cannot tell"  # both seeds lose 0.25, so no spread is seen
    assert all(math.isnan(board["bf16 bf16"][name]) for name in ("improvement", "crossed_low", "p_mcnemar", "p_equal"))


def test_runs_on_the_bases_that_both_have_are_compared_one_by_one() -> None:
    """The control's third base is an easy one: no run of the arm, which never started there, can beat that."""
    control = [run("bf16", "bf16", seed, [[0, 1], [1, right], [1, right]]) for seed, right in enumerate((0, 0, 1))]
    arm = [run("naive", "int8", seed, [[0, 1], [1, 0], [1, 1]]) for seed in range(2)]
    row = rows(leaderboard([*control, *arm]))["naive int8"]
    assert (row["improvement"], row["pairs"], row["difference"]) == (1.0, 2, 0.25)
    want = stats.improvement([stats.Stratum(np.array([0.75, 0.75]), np.array([0.5, 0.5]))])
    assert (row["improvement_low"], row["improvement_high"]) == (want.low, want.high)


def test_a_diverged_run_counts_as_collapsed_and_scores_0() -> None:
    """Means are over all runs; the difference is about the run that stands, beside the rate of collapse."""
    whole = [run("bf16", "bf16", seed, [[0, 1], [1, 1], [1, 1]]) for seed in range(2)]
    broken = run("naive", "int3", 1, [[0, 1], [1, 1]], status="diverged", reason="loss is nan")
    board = rows(leaderboard([*whole, run("naive", "int3", 0, [[0, 1], [1, 1], [1, 1]]), broken]))["naive int3"]
    assert board["status"] == "1 ok, 1 diverged" and board["seeds"] == 2
    assert board["accuracy"] == 0.5  # 1 and 0
    assert board["auc"] == 0.75  # (1 + 1) / 2 and (1 + 0) / 2
    assert board["reward"] == 0.25
    assert board["difference"] == 0 and board["verdict"] == "collapses in 1 of 2"
    assert board["collapse"] == "1 of 2: 1 to 99 %"


def test_what_did_not_finish_is_counted_and_not_scored() -> None:
    lost = [run("naive", "int4", seed, [], status=s, reason="x") for seed, s in enumerate(["failed", "cancelled"])]
    board = rows(leaderboard([run("bf16", "bf16", 0, [[0], [1], [1]]), *lost]))["naive int4"]
    assert (board["seeds"], board["failed"], board["cancelled"], board["verdict"]) == (0, 1, 1, "no result")
    assert math.isnan(board["accuracy"]) and math.isnan(board["difference"])


def test_pairs_need_equal_seeds_and_questions() -> None:
    control = [run("bf16", "bf16", seed, [[0], [1], [1]]) for seed in (0, 1, 2)]
    other = [run("naive", "int8", seed, [[0], [0], [1]]) for seed in (2, 3)]
    asked = run("naive", "int8", 1, [[0], [0], [1]], question_hash="other")
    board = rows(leaderboard([*control, *other, asked]))["naive int8"]
    assert (board["seeds"], board["pairs"], board["difference"]) == (3, 1, -0.5)
    assert board["verdict"] == "cannot tell"
    assert rows(leaderboard(other))["naive int8"]["verdict"] == "no control"


def test_verdicts_with_enough_seeds_find_the_truth() -> None:
    board = rows(leaderboard([result for result, _ in factory.sweep_results(seeds=8)]))
    assert board["naive int4"]["verdict"] == "worse"
    bypass = board["naive int4 bypass_ppo"]
    assert bypass["verdict"] == "collapses in 5 of 8, else worse" and bypass["collapse"].startswith("5 of 8: ")
    assert board["naive int8"]["verdict"] != "better"  # it is 0.02 behind
    assert board["bf16 bf16"]["verdict"] == "control"
    for row in board.values():
        assert row["accuracy_low"] < row["accuracy"] < row["accuracy_high"]
        assert not row["p_adjusted"] < min(row["p"], 2 * row["p_equal"]) - 1e-12
        is_away = row["difference_low"] > 0 or row["difference_high"] < 0
        assert is_away == row["verdict"].endswith(("better", "worse"))  # no row contradicts itself
    assert board["flashrl int4"]["accuracy"] > board["naive int4"]["accuracy"]
    assert board["flashrl int4"]["rollout_accuracy"] < board["naive int4"]["rollout_accuracy"]


def test_cannot_tell_comes_with_a_number_of_seeds() -> None:
    results = [result for result, _ in factory.sweep_results(seeds=3)]
    board = rows(leaderboard(results))
    assert all((row["verdict"] == "cannot tell") == (row["further_seeds"] >= 1) for row in board.values())
    arms, scores = score_arms(results)
    judged = {label: pair.ranking for label, pair in judge_arms(scores, arms).items()}
    for name in (undecided := [name for name, row in board.items() if row["verdict"] == "cannot tell"]):
        more = int(board[name]["further_seeds"])
        assert stats.chance_to_decide(judged[name], more) >= 0.8 > stats.chance_to_decide(judged[name], more - 1)
    assert undecided


def test_contrasts_are_within_a_precision() -> None:
    found = contrasts([result for result, _ in factory.sweep_results(seeds=8)]).to_dict("records")
    assert [(row["arm"], row["control"]) for row in found] == [
        ("flashrl nvfp4", "naive nvfp4"),
        ("flashrl int4", "naive int4"),
        ("naive int4 bypass_ppo", "naive int4"),
    ]
    assert [row["verdict"] for row in found][1:] == ["better", "collapses in 5 of 8, else worse"]
    assert contrasts([factory.result()[0]]).empty


def test_contrasts_with_a_correction_leave_out_what_was_compared_the_other_way_round() -> None:
    results = [
        factory.result(method, "int4", seed=seed)[0] for method in ("naive", "flashrl", "icepop") for seed in (0, 1)
    ]
    both = [(row["arm"], row["difference"]) for row in contrasts(results, "flashrl").to_dict("records")]
    own = contrasts_of(*score_arms(results), "flashrl", without=["naive"]).to_dict("records")
    assert {name for name, _ in both} == {"icepop int4", "naive int4"}
    assert [(row["arm"], row["control"]) for row in own] == [("icepop int4", "flashrl int4")]
    assert (own[0]["arm"], own[0]["difference"]) in both


def test_arms_at_other_settings_are_not_contrasted() -> None:
    both = {"algo__num_minibatches": 2, "trainer__lr": 2e-4}
    changed = [factory.result(method, "int8", seed=1, **both)[0] for method in ("naive", "flashrl")]
    usual = [factory.result(method, "int8")[0] for method in ("naive", "mis", "icepop")]
    found = contrasts([*usual, *changed])
    assert found[["arm", "control"]].to_numpy().tolist() == [
        ["icepop int8", "naive int8"],
        ["mis int8", "naive int8"],
        ["flashrl int8 2 minibatches lr=0.0002", "naive int8 2 minibatches lr=0.0002"],
    ]
    one = [factory.result(method, "int8", algo__num_minibatches=2)[0] for method in ("naive", "flashrl")]
    usual = [factory.result(method, "int8")[0] for method in ("naive", "mis")]
    assert contrasts([*usual, one[1]])["arm"].tolist() == ["mis int8"]
    assert contrasts([*usual, *one])["control"].tolist() == ["naive int8", "naive int8 2 minibatches"]
    assert contrasts_of(*score_arms([*usual, *one]), "flashrl", without=["naive"]).empty, (
        "naive stands in the other table"
    )


def test_an_arm_without_a_control_at_its_own_settings_has_no_verdict() -> None:
    """The label says the rate, though no method has two of them."""
    alike = [factory.result(method, "int8")[0] for method in ("bf16", "naive")]
    table = rows(leaderboard([*alike, factory.result("flashrl", "int8", trainer__lr=5e-4)[0]]))
    assert {arm: (row["control"], row["verdict"]) for arm, row in table.items()} == {
        "bf16 int8": ("bf16 int8", "control"),
        "naive int8": ("bf16 int8", "cannot tell"),
        "flashrl int8 lr=0.0005": ("", "no control"),
    }
    assert math.isnan(table["flashrl int8 lr=0.0005"]["difference"]) and math.isfinite(
        table["naive int8"]["difference"]
    )


def test_the_table_does_not_depend_on_the_order_of_files() -> None:
    results = [result for result, _ in factory.sweep_results(factory.QUICK)]
    assert list(leaderboard(results)["arm"]) == [
        "bf16 bf16", "naive int8", "naive fp8_block", "flashrl nvfp4", "naive nvfp4", "flashrl int4", "naive int4",
        "naive int4 bypass_ppo",
    ]  # fmt: skip
    pd.testing.assert_frame_equal(leaderboard(results), leaderboard(results[::-1]))


def test_marks() -> None:
    plain = run("bf16", "bf16", 0, [[0], [1], [1]], is_draft=True)
    marked = plain.model_copy(update={"method": plain.method.model_copy(update={"reconstructed": "all of it"})})
    row = rows(leaderboard([marked]))["bf16 bf16"]
    assert row["is_draft"] and row["reconstructed"] == "all of it" and row["is_preliminary"]


def test_the_policy_as_deployed_has_verdicts_of_its_own() -> None:
    results = [result for result, _ in factory.sweep_results(seeds=8)]
    board = rows(leaderboard(results))
    row = board["flashrl int4"]
    assert row["deployed_verdict"] == "worse" and row["deployed_difference"] < row["difference"] < 0
    assert row["deployed_difference_high"] < 0 and row["deployed_collapse"] == "0 of 8: at most 31 %"
    alone = rows(leaderboard(results, endpoints=["reference"]))["flashrl int4"]
    assert alone["deployed_verdict"] == "not declared" and math.isnan(alone["deployed_difference"])
    assert alone["verdict"] == row["verdict"] and alone["difference_low"] == row["difference_low"]


def test_a_method_that_must_be_deployed_in_its_format_is_ranked_there() -> None:
    results = [factory.result(m, p, seed=s)[0] for m, p in (("bf16", "bf16"), ("jet_rl", "fp8_block"),
               ("naive", "fp8_block")) for s in range(3)]  # fmt: skip
    board = rows(leaderboard(results))
    assert [board[name]["endpoint"] for name in ("jet_rl fp8_block", "naive fp8_block")] == ["deployed", "reference"]
    first = rows(leaderboard(results, endpoints=["deployed"]))
    assert {row["endpoint"] for row in first.values()} == {"deployed"}


def test_an_arm_that_never_moved_has_no_signal_and_one_answer_is_a_move() -> None:
    control = [run("bf16", "bf16", seed, [[0, 1], [1, 1], [1, 1]]) for seed in range(3)]
    frozen = [run("naive", "int4", seed, [[0, 1], [0, 1], [0, 1]]) for seed in range(3)]
    moved = [*frozen[:2], run("naive", "int4", 2, [[0, 1], [1, 0], [0, 1]])]
    assert rows(leaderboard([*control, *frozen]))["naive int4"]["verdict"] == "no signal"
    assert rows(leaderboard([*control, *moved]))["naive int4"]["verdict"] == "cannot tell"


def test_what_varies_without_replicates() -> None:
    found = components(board_of([result for result, _ in factory.sweep_results(seeds=8)]).scores)
    assert not found.has_replicates and 0 < found.evaluation < 0.02 and found.run >= 0 and found.base >= 0


def test_where_bases_differ_the_single_ones_are_told_by_the_noise_of_replicates() -> None:
    results = factory.replicated({0: 0, 1: 20, 2: 70, 3: 35})
    row = rows(leaderboard(results))["naive int8"]
    assert row["verdict"] == "collapses in 1 of 4"  # to 5, below half of the 40 at the start
    counts = {word: row[f"bases_{word}"] for word in stats.ON_BASE}
    assert row["bases"] == 4 and counts == {"lower": 2, "higher": 0, "equal": 1, "open": 0, "collapsed": 1}
    mean = (75 + 76 + 75) / 300
    assert (row["base_loss_least"], row["base_loss_most"]) == pytest.approx((mean - 0.55, mean - 0.40))
    ((arm, by_base),) = board_of(results).on_bases
    assert arm.label == "naive int8" and len(by_base) == 4
    assert [round(by_base[Base(seed, "aa")].mean, 4) for seed in range(4)] == [-0.0033, -0.2033, -0.7033, -0.3533]
    assert "bases" not in rows(leaderboard(factory.replicated({0: 0, 1: 20}, replicates=1)))["naive int8"]


def test_a_base_with_several_runs_is_one_unit_and_a_replicated_control_enters_by_its_mean() -> None:
    """Three bases, two runs of the arm and three of the control on each; a run's AUC is that of four answers."""

    def cell(method: str, precision: str, base: int, seed: int, right: int) -> RunResult:
        answers = [1] * right + [0] * (4 - right)
        changes = {"base_seed": base, "run_id": f"{method}{base}-{seed}"}
        return run(method, precision, seed, [[0, 0, 0, 1], answers, answers], **changes)

    right = {0: [4, 3, 2], 1: [3, 3, 3], 2: [2, 4, 3]}  # the control's mean is 0.75 on every base
    control = [cell("bf16", "bf16", base, seed, right[base][seed]) for base in right for seed in range(3)]
    arm = [cell("naive", "int4", base, seed, count) for base, pair in enumerate(([2, 2], [1, 2], [2, 3]))
           for seed, count in enumerate(pair)]  # fmt: skip
    row = rows(leaderboard([*control, *arm]))["naive int4"]
    gaps = np.array([0.5, 0.375, 0.625]) - 0.75
    p = stats.paired(dict(enumerate(gaps)), dict.fromkeys(range(3), 0.0)).p
    assert (row["seeds"], row["pairs"]) == (6, 3)
    runs = [np.array(values) / 4 for values in ([2, 2, 1, 2, 2, 3], [4, 3, 2, 3, 3, 3, 2, 4, 3])]
    better = stats.improvement([stats.Stratum(runs[0], runs[1], 3)])  # the interval's units are the bases
    assert [row[f"improvement{end}"] for end in ("", "_low", "_high")] == [better.probability, better.low, better.high]
    assert row["difference"] == pytest.approx(gaps.mean()) and row["p"] == pytest.approx(p)
    assert row["p_sign"] == 0.25  # three bases, all of one sign: 2 of 8 patterns
    assert row["auc"] == pytest.approx(0.5)
    bases = np.array([[1, 1, 0, 0], [1, 0.5, 0, 0], [1, 1, 0.5, 0]])  # resampled are bases, not runs
    drawn = stats.bootstrap(bases, stats.resample(3, 4, np.random.default_rng(0)), stats.mean)
    assert (row["auc_low"], row["auc_high"]) == drawn


def test_a_base_with_several_runs_counts_once_at_the_start_too() -> None:
    """Four runs of a good base, which stays at 0.75, and one of a bad one, which rises from 0.25 to 0.5: nothing falls
    below its start, though four of five starts lie above the mean at the end."""
    curves = [(0, seed, [[1, 1, 1, 0], *[[0, 1, 1, 1]] * 2]) for seed in range(4)]
    curves.append((1, 0, [[1, 0, 0, 0], *[[1, 1, 0, 0]] * 2]))
    board = leaderboard(
        [run("bf16", "bf16", seed, curve, base_seed=base, run_id=f"{base}{seed}") for base, seed, curve in curves]
    )
    row = rows(board)["bf16 bf16"]
    assert (row["accuracy"], row["base_accuracy"]) == (0.625, 0.5)
    assert findings(board) == []


def test_a_base_that_was_trained_again_is_another_one_and_no_pair_mixes_the_two() -> None:
    """Three bases; that of seed 2 was trained twice, on which the arm loses 0.5 and 0.25; one arm ran on one alone."""

    def cells(seed: int, weights: str, control: int, lost: int) -> list[RunResult]:
        found: list[RunResult] = []
        for method, precision, right in (("bf16", "bf16", control), ("naive", "int8", control - lost)):
            answers = [1] * right + [0] * (4 - right)
            changes = {"hashes": {"model": weights}, "run_id": f"{method}{weights}"}
            found.append(run(method, precision, seed, [[1, 0, 0, 0], answers, answers], **changes))
        return found

    runs = [*cells(0, "a", 4, 1), *cells(1, "b", 4, 1), *cells(2, "c", 4, 2), *cells(2, "d", 3, 1)]
    row = rows(leaderboard(runs))["naive int8"]
    assert row["pairs"] == 4 and row["difference"] == pytest.approx(-(1 + 1 + 2 + 1) / 16)
    apart = [r for r in runs if r.run_id not in ("bf16c", "naived")]  # seed 2: the arm on one, the control on the other
    row = rows(leaderboard(apart))["naive int8"]
    assert (row["pairs"], row["seeds"]) == (2, 3) and row["difference"] == pytest.approx(-0.25)
    alone = [run for run in runs if run.run_id in ("bf16c", "naived")]
    row = rows(leaderboard(alone))["naive int8"]
    assert (row["pairs"], row["seeds"], row["verdict"], row["control"]) == (0, 1, "no control", "bf16 bf16")
    names = ("difference", "p_sign", "improvement", "improvement_low", "crossed_low", "wins", "deployed_difference")
    assert all(math.isnan(row[name]) for name in names)
    assert collapse_times.compared(group_arms(alone), "bf16")[0].own == []


def test_a_run_of_the_same_seeds_on_another_device_is_another_run_of_the_arm() -> None:
    """Three bases, each with a run on the CPU and one on a GPU: units are the bases, and no run is lost."""

    def cell(method: str, precision: str, seed: int, device: str, right: int) -> RunResult:
        answers = [1] * right + [0] * (4 - right)
        made = run(method, precision, seed, [[1, 0, 0, 0], answers, answers], run_id=f"{method}{seed}{device}")
        return made.model_copy(
            update={"config": made.config | {"trainer": made.config["trainer"] | {"device": device}}}
        )

    control = [cell("bf16", "bf16", seed, device, 4) for seed in range(3) for device in ("cpu", "cuda")]
    lost = {"cpu": [1, 1, 2], "cuda": [2, 1, 3]}
    arm = [cell("naive", "int8", seed, device, 4 - gaps[seed]) for device, gaps in lost.items() for seed in range(3)]
    gaps = -np.array([1.5, 1.0, 2.5]) / 4
    for order in (1, -1):
        results = [*control, *arm][::order]
        (found,) = collapse_times.compared(group_arms(results), "bf16")
        assert len(found.own) == len(found.other) == 6
        row = rows(leaderboard(results))["naive int8"]
        assert (row["seeds"], row["pairs"], row["collapse"]) == (6, 3, "0 of 6: at most 39 %")
        assert row["difference"] == pytest.approx(gaps.mean())
        assert row["p"] == pytest.approx(scipy_stats.ttest_1samp(gaps, 0).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
        assert (row["wins"], row["losses"]) == (0, 10)
    on_gpu = [run for run in arm if run.run_id.endswith("cuda")]
    row = rows(leaderboard([*control[::2], *on_gpu]))["naive int8"]  # a base's runs are a pair on whatever device
    assert (row["pairs"], row["difference"], row["losses"]) == (3, pytest.approx(-6 / 12), 6)


def test_runs_of_one_base_and_bases_with_one_run_are_units() -> None:
    values = np.array([[1.0, 0.0], [0.0, 0.0], [0.5, 1.0]])
    assert by_base(values, [4, 4, 4]) is values and by_base(values, [0, 1, 2]) is values
    assert by_base(values, [0, 7, 0]).tolist() == [[0.75, 0.5], [0.0, 0.0]]
