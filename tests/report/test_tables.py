"""Tables as Markdown, CSV and terminal text: the numbers of the leaderboard, the marks, and nothing too wide."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from harness.records.arms import arm_labels
from harness.records.run_result import RunResult, TaskEvalRecord
from harness.records.sweep_file import Expectation
from harness.report import task_scores
from harness.report.leaderboard import board_of, contrasts, contrasts_of, leaderboard
from harness.report.sentences import findings, three_sentences
from harness.report.tables import (
    NO_CONTROL,
    WIDTH,
    markdown,
    render_against,
    render_terminal,
    runs_table,
    setup_lines,
    write_tables,
)
from harness.report.verdicts import BELOW, BELOW_ON, LOWER, LOWER_ON, num_below
from harness.sweep import read_sweep
from tests import result_factory as factory
from tests.source_tree import ROOT


def sweep(seeds: int = 3) -> list[RunResult]:
    return [result for result, _ in factory.sweep_results(seeds=seeds)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_csv_holds_the_leaderboard(tmp_path: Path) -> None:
    results = sweep()
    paths = write_tables(board_of(results), tmp_path / "tables", "quick")
    assert [path.name for path in paths] == ["quick.md", "quick.csv", "quick_runs.csv"]
    board, back = leaderboard(results), pd.read_csv(paths[1])
    assert list(back.columns) == list(board.columns)
    assert back["auc"].tolist() == pytest.approx(board["auc"].tolist(), rel=1e-5)
    runs = pd.read_csv(paths[2])
    assert len(runs) == len(results) and not runs["auc"].isna().to_numpy().any()
    assert set(runs["run_id"]) == {run.run_id for run in results}


def test_contrasts_have_the_endpoints_and_the_level_of_the_table() -> None:
    results = sweep()
    text = markdown(board_of(results, endpoints=["reference"], alpha=0.001), "quick")
    rows = [cells(line) for line in text.partition("## What changes")[2].splitlines() if line.startswith("| flashrl")]
    low = contrasts(results, endpoints=["reference"], alpha=0.001).set_index("arm")
    wide = contrasts(results).set_index("arm")
    for arm, _, _, difference, _, _, _, deployed in rows:
        assert deployed == "not declared" and difference.endswith(f"{low.loc[arm, 'difference_high']:+.2f}]")
        assert low.loc[arm, "difference_high"] > wide.loc[arm, "difference_high"]
    assert len(rows) == 2


def test_arms_are_compared_with_no_correction_and_with_tis() -> None:
    def sections(**values: object) -> dict[str, list[str]]:
        parts = markdown(board_of(sweep(), **values), "quick").split("## What changes against ")[1:]
        return {
            part.partition(",")[0]: [cells(line)[0] for line in part.partition("\n## ")[0].splitlines()[6:] if line]
            for part in parts
        }

    plain = ["flashrl nvfp4", "flashrl int4", "naive int4 bypass_ppo"]
    assert sections() == {"no correction": plain, "`flashrl`": ["naive int4 bypass_ppo"]}
    assert sections(control="flashrl") == {"no correction": plain}, "the table itself compares with its control"


def test_the_terminal_compares_a_method_with_tis_where_it_is_no_baseline_itself() -> None:
    others = [factory.result("icepop", "int4", seed=seed)[0] for seed in range(3)]
    board = board_of([*sweep(), *others])
    assert render_against(board_of(sweep())) == ""
    title, _, head, _, *rows = render_against(board).splitlines()
    (found,) = (
        contrasts_of(board.arms, board.scores, "flashrl", without=["naive"])
        .query("method == 'icepop'")
        .to_dict("records")
    )
    assert title == "Against flashrl at the same format:" and head.split()[:2] == ["arm", "pairs"]
    assert len(rows) == 1 and f"{found['difference']:+.3f} [{found['difference_low']:+.2f}, " in rows[0]
    page = markdown(board, "quick").partition("against `flashrl`")[2]
    assert next(line for line in page.splitlines() if line.startswith("| icepop int4 ")).split(" | ")[3] in rows[0]


def test_markdown_shows_the_numbers_the_verdicts_and_the_setting() -> None:
    results = sweep()
    board = leaderboard(results)
    text = markdown(board_of(results), "quick")
    lines = text.partition("## What changes")[0].splitlines()
    head = next(cells(line) for line in lines if line.startswith("| arm"))
    table = {cells(line)[0]: dict(zip(head, cells(line), strict=True)) for line in lines if line.startswith("| naive")}
    row = board[board["arm"] == "naive int4"].iloc[0]
    shown = table["naive int4"]
    assert shown["accuracy, reference"].startswith(f"{row['accuracy']:.3f} [{row['accuracy_low']:.2f}, ")
    assert shown["AUC as deployed"].startswith(f"{row['deployed_auc']:.3f} [")
    assert shown["verdict as deployed"].startswith(row["deployed_verdict"]) and shown["ranked by"] == "reference"
    assert shown["collapsed"] == row["collapse"] == "0 of 3: at most 63 %"
    assert "| all | reference | 0." in text and "no replicates: run has arm by base in it |" in text
    assert shown["sampler reward"].startswith(f"{row['reward']:.3f} [")
    assert shown["AUC"].endswith(f"{row['auc_high']:.2f}]")
    assert shown["verdict"].startswith(row["verdict"])
    assert shown["P(better)"].startswith(f"{row['improvement']:.2f} [")
    assert shown["runs"] == "3 ok"
    for words in ("sort n=8", "s (4 layers x 64)", "sigma 0.5", "80 steps", "3 pairs of base seed", "no kernel noise"):
        assert words in text, words
    assert "slower than BF16" in text and "Control: bf16 bf16." in text


def test_setup_tells_bases_of_another_problem_size() -> None:
    assert "trained at" not in setup_lines([factory.result()[0]])[0]
    assert setup_lines([factory.result(base__n=30)[0]])[0].endswith("; bases trained at n=30")


def test_evaluations_on_tasks_are_a_section_where_there_are_any() -> None:
    results = sweep()
    assert "## Evaluations on tasks" not in markdown(board_of(results), "quick")
    asked = {"number": 0, "task": "a|b", "step": 80, "site": "rollout", "precision": "int8", "engine": "vllm", "k": 2,
             "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64, "question_hash": "q"}  # fmt: skip
    answered = TaskEvalRecord(**asked, correct=[[1, 0], [1, 1], [0, 0], [1, 0]])
    results[3] = results[3].model_copy(update={"evaluations": [answered]})
    section = markdown(board_of(results), "quick").partition("## Evaluations on tasks\n\n")[2]
    head, _, *rows = section.partition("\n\n")[0].splitlines()
    assert cells(head) == list(task_scores.HEAD)
    assert [row.replace("\\|", "/").strip("| ").split(" | ")[:-1] for row in rows] == [
        [arm_labels(results)[results[3].run_id], "a/b", "rollout", "int8", "80", name, "1", "4"]
        for name in ("avg@2", "pass@1", "pass@2")
    ]
    assert [row.split(" | ")[-1].split()[0] for row in rows] == ["0.500", "0.500", "0.750"]


def test_improvement_over_all_settings_is_a_section_where_there_are_several() -> None:
    results = [factory.result(m, p, seed=s, task__n=n)[0] for m, p in (("bf16", "bf16"), ("naive", "int4"))
               for n in (8, 16) for s in range(3)]  # fmt: skip
    text = markdown(board_of(results), "quick")
    section = text.partition("## Probability of improvement over the control, all settings")[2].partition("##")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| naive")]
    assert [row[:3] for row in rows] == [["naive int4", "2", "6"]] and rows[0][3].startswith("0.00 [0.00, 0.")
    one = [run for run in results if run.config["task"]["n"] == 8]
    assert "Probability of improvement over" not in markdown(board_of(one), "quick")


def test_the_setting_lists_every_axis() -> None:
    lines = "\n".join(setup_lines([factory.result(task__n=n)[0] for n in (8, 16)]))
    assert "sort n=8 (512 held-out questions), sort n=16 (512" in lines
    assert "32 prompts x 8 samples" in lines


def test_failures_stay_in_the_table() -> None:
    bad = [
        factory.result("flashrl", "int3", seed=s, status=k)[0] for s, k in enumerate(["diverged", "failed", "skipped"])
    ]
    results = sweep() + bad
    text = markdown(board_of(results), "quick")
    row = next(cells(line) for line in text.splitlines() if line.startswith("| flashrl int3*"))
    assert row[1] == "1/3" and row[-1] == "1 diverged, 1 failed, 1 skipped"
    assert f"flashrl int3, seed 1: failed, failed for the test (`{bad[1].run_id}`)" in text
    lonely = [bad[1]]
    assert "no result" in render_terminal(leaderboard(lonely))
    assert "- | - |" in markdown(board_of(lonely), "quick")


def test_marks_are_explained_where_they_are_used() -> None:
    plain, _ = factory.result()
    method = plain.method.model_copy(update={"reconstructed": "the threshold"})
    marked = plain.model_copy(update={"is_draft": True, "method": method})
    board = leaderboard([marked])
    for text, form in ((markdown(board_of([marked]), "quick"), "`{}` {}"), (render_terminal(board), "{} {}")):
        assert "bf16 bf16*†‡" in text
        for mark, word in (("*", "preliminary"), ("†", "reconstructed"), ("‡", "draft")):
            assert form.format(mark, word) in text
    assert "†" not in render_terminal(leaderboard(sweep()))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_terminal_fits(seeds: int) -> None:
    wide = [
        factory.result(method, precision, mode, seed, task__n=n, knobs={"Some": {"long_knob_name": n}})[0]
        for method, precision, mode in [*factory.QUICK, ("calibrated_clipping", "mxfp4_w4a4+kv8", "bypass_pg")]
        for n in (8, 16)
        for seed in range(seeds)
    ]
    text = render_terminal(leaderboard(wide))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("arm  ") == 2 and "n=8" in text and "n=16" in text
    assert len({line.rstrip()[-9:] for line in text.splitlines()}) > 3


def test_a_long_label_stands_whole_above_its_numbers() -> None:
    parts = ["flashrl.Profile", "flashrl.TIS", "router_replay.RolloutRouting"]
    results = sweep() + [factory.result("flashrl", "int8", seed=seed, parts=parts)[0] for seed in range(3)]
    lines = render_terminal(leaderboard(results)).splitlines()
    place = lines.index("flashrl int8 flashrl.Profile+flashrl.TIS+router_replay.RolloutRouting")
    assert lines[place + 1].split()[0] == "3" and not any("…" in line for line in lines)


def test_terminal_line_by_hand() -> None:
    results = sweep(8)
    board = leaderboard(results)
    row = board[board["arm"] == "naive int4"].iloc[0]
    line = next(line for line in render_terminal(board).splitlines() if line.startswith("naive int4  "))
    half = max(row["difference_high"] - row["difference"], row["difference"] - row["difference_low"])
    assert f" {row['auc']:.3f} " in line and f" {row['deployed_auc']:.3f} " in line
    assert f"{row['difference']:+.3f}±{half:.3f} worse".replace("±0.", "±.") in line and line.endswith("worse")
    head = next(line for line in render_terminal(board).splitlines() if line.startswith("arm "))
    places = [i for i in range(len(head)) if head.startswith("AUC", i)]  # the word of the written table
    assert [line[i : i + 5] for i in places] == [f"{row[name]:.3f}" for name in ("auc", "deployed_auc")]
    assert "accuracy" not in head
    bypass = next(line for line in render_terminal(board).splitlines() if line.startswith("naive int4 bypass_ppo"))
    assert " falls 5/8, worse " in bypass


def test_too_few_seeds_decide_nothing() -> None:
    assert three_sentences(leaderboard(sweep(2))) == ["Fewer than 3 seeds: nothing is decided yet."]


def test_the_terminal_ends_with_three_sentences() -> None:
    board = leaderboard(sweep(8))
    rows = {str(row["arm"]): row for row in board.to_dict("records")}
    left = -rows["flashrl int4"]["difference"]
    lost = {name: -rows[f"naive {name}"]["difference"] for name in ("int4", "nvfp4", "fp8_block", "int8")}
    assert list(lost.values()) == sorted(lost.values(), reverse=True)
    said = three_sentences(board)
    assert said[0] == (
        f"Rollouts without a correction lost {lost['int4']:.2f} (4-bit INT4), {lost['nvfp4']:.2f} (4-bit NVFP4), "
        f"{lost['fp8_block']:.2f} (FP8 (blocks)) and {lost['int8']:.2f} (INT8) of accuracy."
    )
    part, share = "more" if left < lost["int4"] / 2 else "less", 100 * (1 - left / lost["int4"])
    assert said[1] == (
        f"Truncated importance weights gave back {part} than half of the {lost['int4']:.2f} ({share:.0f} %)."
    )
    assert not said[2:]
    few = three_sentences(leaderboard(sweep(3)))
    assert few[2] == "INT8 cost at most 0.03; FP8 (blocks) cost nothing that can be seen with these seeds."
    text = render_terminal(board)
    assert " ".join(text.split()).endswith(" ".join(said))


def test_a_correction_whose_runs_collapsed_and_a_format_without_a_difference_are_not_passed_over() -> None:
    board = leaderboard(sweep(8))
    fallen, unknown = board["arm"] == "flashrl int4", board["arm"] == "naive int8"
    board.loc[fallen, ["verdict", "collapse"]] = ["collapses in 3 of 8, else worse", "3 of 8: 9 to 76 %"]
    board.loc[unknown, ["verdict", "difference"]] = ["no signal", math.nan]
    said = three_sentences(board)
    assert re.fullmatch(
        r"Truncated importance weights gave back (more|less) than half of the 0\.\d\d \(\d+ %\); "
        r"3 of 8 runs with it collapsed and are left out\.", said[1]
    )  # fmt: skip
    assert len(said) == 2  # nothing is known of INT8, so not "every format" costs accuracy


def test_every_decided_loss_is_told_and_the_runs_that_collapsed_beside() -> None:
    """Also where the largest loss is undecided, or that of an arm some of whose runs collapsed."""
    board = leaderboard(sweep(8))
    plain = board["arm"].isin(["naive int8", "naive fp8_block", "naive int4"])
    said = [("naive int8", -0.31, "collapses in 1 of 5, else worse"), ("naive fp8_block", -0.5, "cannot tell"),
            ("naive int4", -0.2, "worse")]  # fmt: skip
    for arm, difference, verdict in said:
        board.loc[board["arm"] == arm, ["difference", "verdict"]] = [difference, verdict]
    assert three_sentences(board[plain]) == [
        "Rollouts without a correction lost 0.31 (INT8) and 0.20 (4-bit INT4) of accuracy.",
        "INT8 collapsed in 1 of 5 runs; the others differ by -0.31.",
        "No corrected arm of INT8 with 3 seeds stands beside it.",
        "FP8 (blocks) (-0.50) is undecided.",
    ]


def test_a_format_that_collapses_is_named_where_none_is_shown_to_lose() -> None:
    board = leaderboard(sweep(8))
    plain = board[board["arm"].isin(["naive int8", "naive int4"])].copy()
    plain["verdict"], plain["difference"] = ["collapses in 1 of 6", "equal"], [-0.07, -0.01]
    assert three_sentences(plain) == [
        "Where runs do not collapse, no rollout format without a correction is shown to lose accuracy.",
        "INT8 collapsed in 1 of 6 runs; the others differ by -0.07, undecided.",
        "4-bit INT4 cost at most 0.03.",
    ]
    plain["verdict"] = ["collapses in 2 of 6, else equal", "no signal"]
    assert three_sentences(plain)[1:] == [
        "INT8 collapsed in 2 of 6 runs; the others differ by -0.07, at most 0.03 apart."
    ]


def test_an_arm_without_a_control_is_explained_where_there_is_one() -> None:
    lone = [run for run in sweep(3) if run.config["method"] != "bf16"]
    text = render_terminal(leaderboard(lone))
    assert " no control" in text and NO_CONTROL in text and NO_CONTROL not in render_terminal(leaderboard(sweep(3)))


def test_single_bases_are_told_where_the_mean_over_bases_is_open() -> None:
    results = factory.replicated({0: 0, 1: 20, 2: 9, 3: 25})
    board = leaderboard(results)
    assert three_sentences(board) == [
        "No rollout format without a correction is shown to lose accuracy on average over bases.",
        "INT8 is undecided (it loses 0.09 to 0.25 on 3 of 4 bases).",
    ]
    text, page = render_terminal(board), markdown(board_of(results), "replicated")
    assert "lower on 3/4 bases" in text and LOWER_ON in text and LOWER_ON not in render_terminal(leaderboard(sweep(3)))
    assert "| lower on 3 of 4 bases, the mean open (+" in page and LOWER in page and BELOW not in page
    assert "| naive int8 | -0.003 equal | -0.203 lower | -0.093 lower | -0.253 lower |" in page
    many = leaderboard(factory.replicated({base: 20 if base % 2 else -20 for base in range(20)}))
    assert " lower on 10/20\n" in render_terminal(many), "no letter is cut off"
    assert "## Base by base" not in markdown(board_of(sweep(3)), "quick")
    small = leaderboard(factory.replicated({base: 20 if base == 3 else (-1) ** base for base in range(9)}))
    assert three_sentences(small)[1:] == ["INT8 is undecided (it loses 0.20 on 1 of 9 bases)."]
    fallen = three_sentences(leaderboard(factory.replicated({0: 0, 1: 20, 2: 70, 3: 35})))
    assert fallen[1].endswith(", undecided (it loses 0.20 to 0.35 on 2 of 4 bases).")


def test_an_arm_below_on_every_base_is_told_where_two_large_losses_leave_the_mean_open() -> None:
    results = factory.replicated(dict.fromkeys(range(10), 1) | {10: 9, 11: 21})
    board = leaderboard(results)
    [row] = board[board["method"] == "naive"].to_dict("records")
    assert (row["bases_below"], row["p_below"], row["verdict"]) == (12, pytest.approx(2 / 4096), "cannot tell")
    assert three_sentences(board)[1:] == [
        "INT8 is below its control on 12 of 12 bases (it loses 0.09 to 0.21 on 2 of 12 bases) and its mean loss is "
        "undecided."
    ]
    signs_alone = board.assign(bases_lower=0)
    assert three_sentences(signs_alone)[0].endswith("is shown to lose accuracy on average over bases.")
    text, page = render_terminal(board), markdown(board_of(results), "below")
    assert "below on 12/12" in text and BELOW_ON in text and LOWER_ON not in text
    assert "| below on 12 of 12 bases, by 0.03 and more on 2, the mean open (+" in page
    assert BELOW in page and LOWER not in page
    few = leaderboard(factory.replicated({0: 1, 1: 1, 2: 1, 3: 40}))
    assert not any(num_below(row) for row in few.to_dict("records"))


def test_a_variant_that_all_rows_have_is_told_once_and_hides_no_sentence() -> None:
    """Runs of 1000 steps with two minibatches beside those of 150 with one: each setting has its sentences."""
    board = leaderboard(sweep(8))
    board = board[board["variant"] == ""]
    plain, said = three_sentences(board), three_sentences(board.assign(context="n=4", variant="2 minibatches"))
    assert len(said) == len(plain) and said[0] == plain[0].removesuffix(".") + ", n=4, 2 minibatches."
    assert said[1:] == plain[1:]


def test_a_loss_at_other_settings_is_named_where_the_usual_ones_show_none() -> None:
    board = leaderboard(sweep(8))
    plain = board[board["arm"].isin(["naive int8", "naive int4"])].copy()
    plain["verdict"] = ["cannot tell", "worse"]
    plain["variant"] = ["", "16 minibatches"]
    plain["difference"], plain["arm"] = [-0.02, -0.13], ["naive int8", "naive int4 16 minibatches"]
    assert three_sentences(plain)[0] == (
        "No rollout format without a correction is shown to lose accuracy at the usual settings; at others naive int4 "
        "16 minibatches (-0.13) does."
    )
    assert three_sentences(plain[:1])[0] == "No rollout format without a correction is shown to lose accuracy."


def test_a_setting_in_which_some_arms_always_collapse_and_others_never_is_told() -> None:
    board = leaderboard(sweep(8)).head(4).copy()
    board["method"], board["precision"] = ["bf16", "naive", "flashrl", "mis"], ["bf16", "int8", "int8", "int8"]
    board["variant"], board["is_preliminary"] = "staleness 16", False
    board["collapse"] = ["3 of 3: at least 37 %", "3 of 3: at least 37 %", "0 of 3: at most 63 %", "1 of 3: 1 to 91 %"]
    told = "With staleness 16 every run of bf16 bf16 and naive int8 collapses, and none of flashrl int8."
    assert three_sentences(board)[0] == told
    board["variant"] = ["", "", "staleness 16", "staleness 16"]  # the usual setting has words of its own
    assert not any(line.startswith("With") for line in three_sentences(board))
    board["variant"], board["is_preliminary"] = "staleness 16", [False, False, True, False]
    assert not any(line.startswith("With") for line in three_sentences(board))


def test_an_arm_of_which_no_run_was_evaluated_is_a_row_without_numbers() -> None:
    """Three runs of a variant took every step, and each of their evaluations ended in an error."""
    lost = [run.model_copy(update={"evals": []}) for run in sweep() if run.config["algo"]["mode"] == "bypass_ppo"]
    results = [run for run in sweep() if run.config["algo"]["mode"] == "decoupled"] + lost
    board = board_of(results)
    row = board.table.set_index("arm").loc["naive int4 bypass_ppo"]
    assert (row["seeds"], row["collapse"], row["verdict"]) == (3, "-", "no result")
    page = markdown(board, "quick")
    shown = next(cells(line) for line in page.splitlines() if line.startswith("| naive int4 bypass_ppo"))
    assert shown[1:9] == ["3", "-", "-", "-", "-", "no result", "-", "-"]
    assert "naive int4 bypass_ppo" in render_terminal(board.table)
    assert three_sentences(board.table) == three_sentences(board_of(results[:-3]).table)


def test_equal_is_never_printed_without_its_bound_on_collapse() -> None:
    results = [factory.result(m, p, seed=s)[0] for m, p in (("bf16", "bf16"), ("naive", "int8")) for s in range(16)]
    board = leaderboard(results)
    assert board[board["arm"] == "naive int8"].iloc[0]["verdict"] == "equal"
    assert "equal, falls ≤17%" in render_terminal(board)
    assert "| equal (collapse 0 of 16: at most 17 %) |" in markdown(board_of(results), "quick")


def test_runs_are_sorted_by_arm_and_seed() -> None:
    table = runs_table(sweep()[::-1])
    assert table["seed"].tolist()[:3] == [0, 1, 2] and table["arm"].is_monotonic_increasing


def test_findings_name_reversals_collapses_and_expectations() -> None:
    results = sweep(8)
    expectations = read_sweep("quick", ROOT / "sweeps").expectations
    said = findings(leaderboard(results), expectations)
    assert any(line.startswith("naive int4 bypass_ppo: training ends below its start") for line in said)
    reversal = [line for line in said if line.startswith("int4: flashrl int4 is ahead of naive int4 in the reference")]
    assert len(reversal) == 1 and "behind it in the rollout format" in reversal[0]
    board = leaderboard(results)
    board = board[board["arm"].isin(["flashrl int4", "naive int4"])].set_index("arm", drop=False)
    assert len(findings(board, [])) == 1
    for column, value in (("rollout_accuracy", board.at["flashrl int4", "rollout_accuracy"] + 0.02), ("seeds", 1)):
        near = board.copy()
        near.at["naive int4", column] = value
        assert not findings(near, []), column
    expected = [line for line in said if "as expected" in line]
    assert len(expected) == len(expectations) == 5 and all(line.startswith("as expected") for line in expected)


def test_findings_say_what_was_not_as_expected() -> None:
    """The arms' places swapped: the same sentences, the other way round."""
    swap = {"naive": "flashrl", "flashrl": "naive"}
    results = [
        run.model_copy(update={"config": run.config | {"method": swap.get(run.method.name, run.method.name)}})
        for run in sweep()
    ]
    said = findings(leaderboard(results), read_sweep("quick", ROOT / "sweeps").expectations)
    assert any(line.startswith("NOT as expected: TIS repairs part of int4") for line in said)


def test_an_expectation_of_arms_that_are_not_there_is_told() -> None:
    odd = [Expectation(text="x", score="auc", low="naive int3", high="bf16 bf16"),
           Expectation(text="y", score="acc", low="naive int4", high="bf16 bf16")]  # fmt: skip
    said = [line for line in findings(leaderboard(sweep()), odd) if line.startswith("not judged")]
    assert said == ["not judged: x (no auc of both naive int3 and bf16 bf16 in one table)",
                    "not judged: y (no acc of both naive int4 and bf16 bf16 in one table)"]  # fmt: skip


def test_expectations_are_checked_whatever_the_task_and_the_engine() -> None:
    other = {"task__name": "chain", "engine__name": "vllm"}
    results = [factory.result(*arm, seed=s, **other)[0] for arm in factory.QUICK for s in range(2)]
    expectations = read_sweep("quick", ROOT / "sweeps").expectations
    assert sum("expected" in line for line in findings(leaderboard(results), expectations)) == len(expectations)
