"""The figure of differences: one marker per arm and context at the leaderboard's numbers, columns of equal length."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from harness.records.arms import group_arms
from harness.records.run_result import write_result
from harness.report import figures
from harness.report.leaderboard import board_of, leaderboard
from harness.report.plots.differences import FADED, _halves, differences
from harness.report.plots.style import STYLE
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
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["n=8", "n=16", "undecided"]


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


def test_every_context_has_a_look_of_its_own_and_stands_at_its_row() -> None:
    """Five contexts with long names: the legend is inside the figure, and so is the line below."""
    arms = (("bf16", "bf16"), ("naive", "int8"), ("flashrl", "int8"))
    names = {"name": "words_10m", "num_layers": 6, "hidden_size": 384, "spread": 0.5, "path": None}
    runs = [
        result(*arm, seed=seed, task__n=n, model=names | {"name": f"words_{size}m"})[0]
        for arm in arms for seed in range(2) for n, size in ((4, 10), (8, 10), (16, 10), (32, 10), (8, 30))
    ]  # fmt: skip
    board = {str(row["arm"]): row for row in leaderboard(runs).to_dict("records")}
    with mpl.rc_context(fname=STYLE):
        figure = differences(group_arms(runs), board, "bf16")
        assert figure is not None
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        (box,) = figure.legends
        *looks, faded = box.get_lines()
        assert len({(line.get_color(), line.get_marker()) for line in looks}) == len(looks) == 5
        assert faded.get_label() == "undecided"
        inside = [box.get_window_extent(), figure._supxlabel.get_window_extent()]  # pyright: ignore
        assert all(found.x0 >= 0 and found.x1 <= figure.bbox.width for found in inside)
    markers = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]  # pyright: ignore
    assert len(markers) == 2 * 5
    places = sorted(float(line.get_ydata()[0]) for line in markers)  # pyright: ignore
    assert places == pytest.approx([row + step for row in (0, 1) for step in (-0.36, -0.18, 0, 0.18, 0.36)])
    many = [result(*arm, seed=0, task__n=n)[0] for arm in arms for n in range(2, 11)]
    board = {str(row["arm"]): row for row in leaderboard(many).to_dict("records")}
    assert differences(group_arms(many), board, "bf16") is None, "nine contexts are more than there are looks"


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
