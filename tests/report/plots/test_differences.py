"""The figure of differences: one marker per arm and context at the leaderboard's numbers, columns of equal length."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.records.arms import group_arms
from harness.records.run_result import write_result
from harness.report import figures
from harness.report.leaderboard import board_of, leaderboard
from harness.report.plots.differences import FADED, _halves, differences
from tests.result_factory import QUICK, result


def sweep(lengths: tuple[int, ...] = (8, 16)) -> list:
    return [result(*arm, seed, task__n=n) for arm in QUICK for seed in range(3) for n in lengths]


def test_every_difference_is_drawn_where_the_table_has_it() -> None:
    runs = [record for record, _ in sweep()]
    board = {str(row["arm"]): row for row in leaderboard(runs).to_dict("records")}
    figure = differences(group_arms(runs), board, "bf16")
    assert figure is not None
    (ax,) = figure.axes
    drawn = sorted(float(line.get_xdata()[0]) for line in ax.lines if len(line.get_xdata()) == 1)
    wanted = sorted(row["difference"] for row in board.values() if row["difference"] == row["difference"])
    assert drawn == pytest.approx(wanted) and len(drawn) == 2 * (len(QUICK) - 1)
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert len(names) == len(QUICK) - 1 and names[0].startswith("int8")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["n=8", "n=16", "mean undecided"]


def test_each_of_five_contexts_has_a_look_of_its_own_and_stays_in_its_row() -> None:
    runs = [record for record, _ in sweep((4, 8, 16, 32, 64))]
    runs += [result("bf16", "bf16", seed, task__n=128)[0] for seed in range(3)]
    board = {str(row["arm"]): row for row in leaderboard(runs).to_dict("records")}
    figure = differences(group_arms(runs), board, "bf16")
    assert figure is not None
    (ax,) = figure.axes
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["n=4", "n=8", "n=16", "n=32", "n=64", "mean undecided"]  # the control alone has n=128
    looks = [(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()[:5]]
    markers = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert len(set(looks)) == 5 and {(line.get_color(), line.get_marker()) for line in markers} == set(looks)
    heights = sorted(float(line.get_ydata()[0]) for line in markers)
    assert heights[:5] == pytest.approx([-0.288, -0.144, 0.0, 0.144, 0.288])


def test_a_name_says_how_many_runs_collapsed_and_an_open_difference_of_the_others_is_faded() -> None:
    runs = [record for record, _ in sweep((8,))]
    board = {str(row["arm"]): row for row in leaderboard(runs).to_dict("records")}
    board["naive int8"] |= {"verdict": "collapses in 1 of 3", "collapse": "1 of 3: 1 to 91 %"}
    figure = differences(group_arms(runs), board, "bf16")
    assert figure is not None
    (ax,) = figure.axes
    names = [text.get_text() for text in ax.get_yticklabels()]
    row = names.index("int8  naive, 1 of 3 collapse")
    (marker,) = (line for line in ax.lines if list(line.get_ydata()) == [row])
    assert marker.get_alpha() == FADED


def test_without_a_control_there_is_nothing_to_draw() -> None:
    runs = [record for record, _ in sweep() if record.config["method"] != "bf16"]
    board = {str(row["arm"]): row for row in leaderboard(runs).to_dict("records")}
    assert differences(group_arms(runs), board, "bf16") is None


def test_columns_are_cut_between_precisions() -> None:
    rows = [("int8", str(i)) for i in range(12)] + [("nvfp4", str(i)) for i in range(9)]
    rows += [("int4", str(i)) for i in range(20)]
    assert [len(half) for half in _halves(rows)] == [21, 20]
    assert _halves(rows[:30]) == [rows[:30]]
    assert [len(half) for half in _halves([("int4", str(i)) for i in range(40)])] == [20, 20]


def test_a_sweep_too_large_for_curves_gets_this_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record, rows in sweep():
        write_result(tmp_path / "runs" / "quick", record, rows)
    monkeypatch.setattr(figures, "MAX_ARMS", 2)
    board = board_of([record for record, _ in sweep()])
    names = {path.name for path in figures.draw_all(board, tmp_path / "runs" / "quick", tmp_path / "out")}
    assert names == {"along.png", "differences.png", "scores-n8.png", "scores-n16.png", "profiles.png"}
