"""What the paper figures draw with: looks that stay with a method, points with intervals, rows of estimates, notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.published.figures.estimates import Estimate
from harness.report.plots.colours import GREEN, GREY, INK, NOTE, ORANGE, PINK, REFERENCE, SKY
from harness.report.plots.style import FAMILIAR, Look

METHODS = FAMILIAR | {
    "bf16": Look(colour=INK, dash="-", marker="o"),
    "fp16": Look(colour=GREEN, dash=(0, (8, 1.5)), marker="P"),
    "fp32_head": Look(colour=ORANGE, dash=(0, (5, 1.2, 1.2, 1.2)), marker="D"),
    "zero_mismatch": Look(colour=GREY, dash=(0, (1.2, 1.2)), marker="h"),
    "bf16_tis": Look(colour=SKY, dash=(0, (3, 1)), marker="s"),
    "qurl": Look(colour=GREEN, dash=(0, (8, 1.5)), marker="D"),
    "qurl_acr": Look(colour=ORANGE, dash=(0, (5, 1.2, 1.2, 1.2)), marker="^"),
    "qurl_lr": Look(colour=GREY, dash=(0, (1.2, 1.2)), marker="v"),
    "qerl": Look(colour=GREEN, dash="-", marker="D"),
    "qerl_no_aqn": Look(colour=ORANGE, dash=(0, (5, 1.2, 1.2, 1.2)), marker="^"),
    "bf16_lora": Look(colour=SKY, dash=(0, (3, 1)), marker="s"),
    "aqn_bf16": Look(colour=PINK, dash=(0, (1.2, 1.2)), marker="P"),
    "qlora": Look(colour=GREY, dash=(0, (8, 1.5)), marker="v"),
    "jet_rl": Look(colour=GREEN, dash=(0, (8, 1.5)), marker="D"),
    "rilq": Look(colour=GREEN, dash="-", marker="D"),
    "qat_kd": Look(colour=PINK, dash=(0, (3, 1, 1, 1)), marker="P"),
}
"""Method -> look. Methods that share a colour share no figure."""


def draw_points(ax: Axes, xs: Sequence[float], estimates: Sequence[Estimate], look: Look, shift: float = 0.0) -> None:
    """A line through estimates with their intervals as bars."""
    at = [x + shift for x in xs]
    ax.plot(at, [e.value for e in estimates], color=look.colour, linestyle=look.dash, marker=look.marker)
    for x, e in zip(at, estimates, strict=True):
        if not math.isnan(e.low):
            ax.plot([x, x], [e.low, e.high], color=look.colour, linewidth=0.9, alpha=0.6, solid_capstyle="butt")


def draw_rows(ax: Axes, rows: Sequence[tuple[str, Estimate, Look]], zero: float | None = 0.0) -> None:
    """One row per arm from the top: name, estimate, interval; `zero` is a line."""
    for y, (_, e, look) in enumerate(rows):
        if not math.isnan(e.low):
            ax.plot([e.low, e.high], [y, y], color=look.colour, linewidth=1.2, alpha=0.7, solid_capstyle="butt")
        ax.plot(e.value, y, color=look.colour, marker=look.marker, linestyle="", markersize=4)
    name_rows(ax, [name for name, *_ in rows], zero)


def name_rows(ax: Axes, names: Sequence[str], zero: float | None = 0.0) -> None:
    """Names of the rows from the top, and a line at `zero`."""
    if zero is not None:
        ax.axvline(zero, color=REFERENCE, linewidth=0.8, zorder=1)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def note(figure: Figure, text: str) -> None:
    """A line below everything: what the figure cannot show."""
    figure.supxlabel(text, fontsize=6.5, color=NOTE, x=0.01, ha="left")
