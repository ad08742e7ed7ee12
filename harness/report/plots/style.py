"""Panels of curves: one per precision, so that ten arms and more stay apart, with the control in every panel.

A look belongs to a method (and variant). It differs in colour, dash and marker at once, so that it survives a grey
print.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from harness.records.arms import Arm
from harness.records.sweep_file import BASELINES
from harness.report.plots.bands import Band
from harness.report.plots.colours import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INK,
    OLIVE,
    ORANGE,
    PINK,
    SKY,
    STRIPE,
    VERMILION,
    VIOLET,
)

STYLE = Path(__file__).with_name("plot_style.mplstyle")
COLOURS = (GREEN, ORANGE, SKY, GREY, PINK, BLUE, VIOLET, BROWN, OLIVE)
"""Okabe and Ito's palette, less black (the control), vermilion (no correction) and yellow (too pale), with a grey and
three more."""
DASHES: tuple[Any, ...] = ((0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (8, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "^Dv<>hp*d8H"
"""Markers that no familiar look has. Their number is a prime above that of COLOURS, so that no two looks share both
colour and marker before every pair was taken."""
LEGEND_LINE = 0.16
"""Inches of a line of a legend."""

Fill = Literal["full", "none", "left", "right", "bottom", "top"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look of one method and variant, the same in every panel."""

    colour: str
    dash: Any
    marker: str
    fill: Fill = "full"


Looks = dict[str, Look]
FAMILIAR = {
    BASELINES[-1]: Look(colour=VERMILION, dash=(0, (5, 1.5)), marker="X"),
    BASELINES[0]: Look(colour=BLUE, dash="-", marker="s"),
    f"{BASELINES[-1]} bypass_ppo": Look(colour=PINK, dash=(0, (2.5, 1)), marker="P"),
}
"""Looks that are the same in the figures of every sweep."""

PRECISION_LOOKS = {
    "bf16": Look(colour=INK, dash="-", marker="o"),
    "fp32": Look(colour=GREY, dash=(0, (1.2, 1.2)), marker="h"),
    "fp16": Look(colour=GREEN, dash=(0, (8, 1.5)), marker="P"),
    "int8": Look(colour=BLUE, dash="-", marker="s"),
    "fp8_block": Look(colour=SKY, dash=(0, (5, 1.2, 1.2, 1.2)), marker="D"),
    "nvfp4": Look(colour=ORANGE, dash=(0, (3, 1)), marker="v"),
    "int4": Look(colour=VERMILION, dash=(0, (5, 1.5)), marker="X"),
    "int3": Look(colour=PINK, dash=(0, (1.2, 1.2)), marker="^"),
    "int2": Look(colour=GREY, dash=(0, (3, 1, 1, 1)), marker="<"),
}
"""Looks of the formats where a line is a precision and the method is the same."""


def looks_of(arms: Sequence[Arm], control: str) -> Looks:
    """A look per method and variant: black for the control, the familiar ones always the same, the rest in turn."""
    return looks_of_names((style_name(arm) for arm in arms), control)


def looks_of_names(given: Iterable[str], control: str) -> Looks:
    """A look per style name, as `looks_of`."""
    names = sorted(set(given), key=lambda name: (" " in name, name))
    known = FAMILIAR | {control: Look(colour=INK, dash="-", marker="o")}
    taken = {known[name].colour for name in names if name in known}
    colours = cycle([colour for colour in COLOURS if colour not in taken] or COLOURS)
    rest = zip(colours, cycle(DASHES), cycle(MARKERS), strict=False)
    looks: Looks = {}
    for name in names:
        if name not in known:
            colour, dash, marker = next(rest)
            known[name] = Look(colour=colour, dash=dash, marker=marker)
        looks[name] = known[name]
    return looks


def style_name(arm: Arm) -> str:
    """Name of the arm in a legend: its panel says the precision."""
    return f"{arm.method} {arm.variant}".strip()


def small_multiples(
    arms: Sequence[Arm],
    curve: Callable[[Arm], Band],
    x_label: str,
    y_label: str,
    *,
    looks: Looks,
    control: str,
    is_log: bool = False,
    marked: bool = False,
    x_linear_below: float | None = None,
    panel: Callable[[str, Sequence[Arm]], str] = lambda precision, inside: precision,
    title: Callable[[Mapping[str, Band]], str] = lambda bands: "",
    note: str = "",
) -> Figure | None:
    """One panel per precision with the control in each; None where no arm has such a curve.

    `marked` puts a marker on every point; `x_linear_below` makes the x axis logarithmic beyond it; `panel` titles the
    panel of a precision and its arms, `title` the figure of these bands by the arm's label; `note` ends the x label.
    """
    bands = {arm.label: band for arm in arms if len((band := curve(arm)).x)}
    reference = [arm for arm in arms if arm.method == control and not arm.variant and arm.label in bands]
    others = [arm for arm in arms if arm.label in bands and arm not in reference]
    panels = {arm.precision: [a for a in others if a.precision == arm.precision] for arm in others or reference}
    if not panels:
        return None
    columns = min((4, 3), key=lambda n: (-len(panels) % n, -n)) if len(panels) > 4 else len(panels)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6.75, 1.75 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax, (precision, inside) in zip(axes.flat, panels.items(), strict=False):
        ax.set_title(panel(precision, inside), fontsize=7)
        for arm in [*reference, *inside]:
            draw_band(ax, bands[arm.label], looks[style_name(arm)], is_log, marked)
        if is_log:
            _log_scale(ax, [style_name(arm) for arm in inside if not (bands[arm.label].middle > 0).any()])
        if x_linear_below is None:
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        else:
            ax.set_xscale("symlog", linthresh=x_linear_below, linscale=0.4)
    close_grid(axes, len(panels))
    figure.supxlabel(x_label + note, fontsize=8)
    figure.supylabel(y_label, fontsize=8)
    shown = [style_name(arm) for arm in [*reference, *others]]
    lines = legend(figure, {name: looks[name] for name in dict.fromkeys(shown)}, marked, title=title(bands))
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, lines - 2))  # panels keep their height
    return figure


def close_grid(axes: Any, count: int) -> None:
    """Hide the panels [rows, columns] after the first `count`; the x axes above them get their numbers."""
    for ax, above in zip(axes.flat[count:], axes.flat[count - axes.shape[1] :], strict=False):
        ax.set_axis_off()
        above.xaxis.set_tick_params(labelbottom=True)


def stripes(ax: Axes, names: Sequence[str]) -> None:
    """A grey background behind every second group of rows; `names` of the groups, row by row."""
    for index, name in enumerate(dict.fromkeys(names)):
        if index % 2 == 0:
            first = names.index(name) - 0.5
            ax.axhspan(first, first + names.count(name), color=STRIPE, zorder=0, linewidth=0)


def shift_of(index: int, count: int, width: float) -> float:
    """Place of one of `count` points that stand side by side around 0, `width` from the first to the last."""
    return width * (index / (count - 1) - 0.5) if count > 1 else 0.0


def draw_band(ax: Axes, band: Band, look: Look, is_log: bool = False, marked: bool = False) -> None:
    """The middle as a line, the seeds as a band, a cross where a run diverged. A log axis leaves out zeros."""
    middle, low, high = (
        np.where(values > 0, values, np.nan) if is_log else values for values in (band.middle, band.low, band.high)
    )
    front = 3 if look.colour == INK else 2
    ax.fill_between(band.x, low, high, color=look.colour, alpha=0.16, linewidth=0, zorder=front - 1)
    marker = look.marker if marked else ""
    width = 1.3 if len(band.x) < 20 else 1.0
    ax.plot(band.x, middle, color=look.colour, linestyle=look.dash, marker=marker, linewidth=width, zorder=front)
    for x, y in band.ends:
        ax.plot(x, y, marker="x", markersize=6, color=look.colour, zorder=4)


def log_y(ax: Axes) -> None:
    """A logarithmic y axis, where a line has a value that it can show."""
    if any(value > 0 for line in ax.lines for value in np.asarray(line.get_ydata(), float)):
        ax.set_yscale("log")
        low, high = np.log10(ax.get_ylim())
        if np.floor(high) > np.ceil(low):  # else powers of ten alone leave an axis with one label or none
            ax.minorticks_off()


def _log_scale(ax: Axes, zeros: Sequence[str]) -> None:
    """A logarithmic y axis, which cannot show the arms that are exactly 0: they are named."""
    log_y(ax)
    said = "\n".join(f"{name}: exactly 0" for name in zeros)
    ax.text(0.04, 0.98, said, transform=ax.transAxes, fontsize=6.5, va="top")


def legend(figure: Figure | SubFigure, looks: Looks, marked: bool = True, columns: int = 5, title: str = "") -> int:
    """One legend of looks above all panels, under the figure's title: the number of its lines."""
    handles = [
        Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker if marked else "",
               fillstyle=look.fill, label=name)
        for name, look in looks.items()
    ]  # fmt: skip
    return above_panels(figure, handles, columns, title)


def above_panels(figure: Figure | SubFigure, handles: Sequence[Any], columns: int, title: str) -> int:
    """A legend above all panels, in at most so many columns as its longest name leaves room for, and above it the
    figure's title, which a suptitle would print across it; in several lines where the figure is too narrow for one.
    The number of the legend's lines."""
    small, bold = FontProperties(size=rcParams["legend.fontsize"]), FontProperties(size=8.5, weight="bold")
    em = small.get_size_in_points() / 72
    spaces = rcParams["legend.handlelength"] + rcParams["legend.handletextpad"] + rcParams["legend.columnspacing"]
    widest = max(_inches(handle.get_label(), small) for handle in handles) + em * spaces
    columns = max(1, min(len(handles), columns, int(figure.bbox.width / figure.dpi / widest)))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=columns,
        title=in_lines(figure, title, bold) or None,
        title_fontproperties=bold,
    )
    return math.ceil(len(handles) / columns)


def in_lines(figure: Figure | SubFigure, text: str, font: FontProperties) -> str:
    """A text broken into lines that the figure is wide enough for."""
    if not text:
        return text
    return textwrap.fill(text, int(0.95 * len(text) * figure.bbox.width / figure.dpi / _inches(text, font)))


def _inches(text: str, font: FontProperties) -> float:
    return TextPath((0, 0), text, prop=font).get_extents().width / 72
