"""Titles above all panels, as wide as their figure."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.style import above_panels, log_y, looks_of_names


def test_a_title_is_broken_where_the_figure_is_too_narrow() -> None:
    words = (
        "Of 53 arms: 7 better than bf16, 8 equal to bf16, 25 worse than bf16, 3 with runs that collapse; 10 undecided"
    )
    for wide, lines in ((7.6, 2), (12.0, 1), (2.9, 3)):
        figure = Figure(figsize=(wide, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        above_panels(figure, [Line2D([], [], label="x")], 1, words)
        figure.draw_without_rendering()
        title = figure.legends[0].get_title()
        assert title.get_text().count("\n") == lines - 1 and title.get_text().split() == words.split()
        assert title.get_window_extent().width < figure.bbox.width


def test_a_legend_has_as_many_columns_as_its_longest_name_leaves_room_for() -> None:
    names = ["words_100m n=10 sigma=0", "words_10m n=4 sigma=0", "words_10m n=10 sigma=0.5", "undecided"]
    for wide, rows in ((7.6, 2), (12.0, 1), (2.9, 4)):
        figure = Figure(figsize=(wide, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        above_panels(figure, [Line2D([], [], label=name) for name in names], 5, "")
        figure.draw_without_rendering()
        legend = figure.legends[0]
        assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == rows
        assert legend.get_window_extent().width < figure.bbox.width


def test_looks_share_no_colour_while_there_are_some_and_never_colour_and_marker() -> None:
    names = ["bf16", "flashrl", "naive", "naive bypass_ppo", *(f"m{number:02}" for number in range(77))]
    looks = looks_of_names(names, "bf16")
    assert len({looks[name].colour for name in names[:11]}) == 11
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(names) == 81


@pytest.mark.parametrize(("values", "labels"), [((0.21, 0.29), 9), ((1e-5, 1e-1), 5), ((2e-5, 9e-5), 4)])
def test_a_logarithmic_axis_has_labels_within_a_decade_too(values: tuple[float, float], labels: int) -> None:
    figure = Figure(figsize=(4, 3))
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    ax.plot([0, 1], values)
    log_y(ax)
    figure.draw_without_rendering()
    low, high = ax.get_ylim()
    ticks = [*ax.yaxis.get_major_ticks(), *ax.yaxis.get_minor_ticks()]
    shown = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
    assert len([text for text in shown if text]) == labels
