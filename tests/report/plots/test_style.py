"""Titles above all panels, as wide as their figure."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.style import above_panels


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
