"""The table of falls: rows, steps, and p values over all arms of a setting."""

from __future__ import annotations

from harness.records.arms import group_arms
from harness.records.run_result import RunResult
from harness.records.stats import Fall
from harness.report.collapse_times import HEAD, compared, fall_of, table
from harness.report.leaderboard import board_of
from harness.report.tables import markdown
from tests import result_factory as factory


def run(method: str, precision: str, seed: int, accuracies: tuple[float, ...], **values: object) -> RunResult:
    """A run with these accuracies of the BF16 policy at steps 0, 20, 40, 60, 80."""
    found = factory.result(method, precision, seed=seed)[0]
    told = dict(zip((0, 20, 40, 60, 80), accuracies, strict=False))
    evals = [e.model_copy(update={"accuracy": told[e.step], "correct": []}) if e.site == "reference" else e
             for e in found.evals if e.step in told]  # fmt: skip
    return found.model_copy(update={"evals": evals, **values})


STANDS, FALLS = (0.4, 0.5, 0.6, 0.7, 0.8), (0.4, 0.5, 0.1, 0.1, 0.1)
SEEDS = range(6)


def results() -> list[RunResult]:
    """BF16 stands, and so does INT4 with TIS. INT4 without a correction falls at 40, and at 20 where it diverges; INT3
    with TIS falls at 40, and INT8 in two runs."""
    found = [run("bf16", "bf16", seed, STANDS) for seed in SEEDS]
    found += [run("naive", "int4", seed, FALLS) for seed in SEEDS[:5]]
    found += [run("naive", "int4", 5, (0.4, 0.1), status="diverged")]
    found += [run("flashrl", "int4", seed, STANDS) for seed in SEEDS]
    found += [run("flashrl", "int3", seed, FALLS) for seed in SEEDS]
    found += [run("naive", "int8", seed, FALLS if seed < 2 else STANDS) for seed in SEEDS]
    return found


def test_when_a_run_fell() -> None:
    assert fall_of(run("bf16", "bf16", 0, STANDS)) == Fall(step=80, has_fallen=False)
    assert fall_of(run("bf16", "bf16", 0, FALLS)) == Fall(step=40, has_fallen=True)
    assert fall_of(run("bf16", "bf16", 0, (0.4, 0.5), status="diverged")) == Fall(step=40, has_fallen=True)
    assert fall_of(run("bf16", "bf16", 0, (0.4,))) is None


def test_rows_are_of_arms_that_fall_and_p_values_count_those_that_could_show_it() -> None:
    assert len(compared(group_arms(results()), "bf16")) == 4
    head, _, *rows = table(group_arms(results()), "bf16").splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(HEAD)
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in found] == ["flashrl int3", "naive int4", "naive int8"]
    assert found[0][-2:] == [f"{2 / 64:.3f}", f"{2 * 2 / 64:.3f}"]
    assert found[2][3:] == ["2 of 6, at 40, 40", "0 of 6", f"{2 - 2 * 6 / 12:+.1f}", "0.500", "-"]
    # at 20 one of 12 falls, half of it expected of the arm; at 40 five of 11 of which it has 5
    excess = 1 - 0.5 + 5 - 5 * 5 / 11
    assert found[1] == ["naive int4", "bf16 bf16", "6", "6 of 6, at 20, 40, 40, 40, 40, 40", "0 of 6", f"{excess:+.1f}",
                   f"{2 / 64:.3f}", f"{2 * 2 / 64:.3f}"]  # fmt: skip


def test_a_report_has_the_section_where_a_run_fell() -> None:
    found = results()
    text = markdown(board_of(found), "x")
    assert "## When runs collapse" in text and table(group_arms(found), "bf16") in text
    found = [
        one
        for one in found
        if (one.method.name, one.config["precision"]["name"]) in (("bf16", "bf16"), ("flashrl", "int4"))
    ]
    assert "## When runs collapse" not in markdown(board_of(found), "x")
