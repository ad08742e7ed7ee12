"""The figure of a large sweep: every arm's difference from the control with its interval, all contexts side by side.

Rows are arms by precision, from the best to the worst; a marker is a context (a length). A row's name says how many of
its runs collapsed, which are in none of the differences. Two columns keep seventy arms on one page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

from harness.records.arms import Arm, label
from harness.records.stats import COLLAPSES, DELTA
from harness.report.plots.colours import BLUE, GREEN, INK, PINK, REFERENCE, SKY, VERMILION
from harness.report.plots.style import above_panels, in_lines, stripes, style_name
from harness.report.plots.titles import score_words, scores_title

CONTEXTS = (
    (INK, "o", "full"),
    (BLUE, "s", "none"),
    (VERMILION, "D", "full"),
    (GREEN, "^", "none"),
    (PINK, "v", "full"),
    (SKY, "p", "none"),
)
"""(colour, marker, fill) of the contexts in order."""
DECIDED = ("better", "worse", "equal")
"""Ends of a verdict, that of the runs which stand where others collapsed, that say where a difference lies."""
FADED = 0.4
"""Opacity of differences without a verdict."""
ZOOM = 0.05
"""Differences up to this are drawn on a linear axis, larger ones on a logarithmic one."""
TICKS = (-1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3)
Rows = list[tuple[str, str]]
"""(precision, name)."""


def differences(arms: Sequence[Arm], board: dict[str, Any], control: str) -> Figure | None:
    """AUC minus the control's of every arm that was compared; None where there is none."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for arm in arms:
        row = board[arm.label]
        if not math.isnan(row["difference"]):
            found.setdefault((arm.precision, style_name(arm)), {})[label(arm.context)] = row
    if not found:
        return None
    contexts = [
        context
        for context in dict.fromkeys(label(arm.context) for arm in arms)
        if any(context in by_context for by_context in found.values())
    ]
    precisions = list(dict.fromkeys(arm.precision for arm in arms))
    order = sorted(found, key=lambda key: (precisions.index(key[0]), -_mean(found[key])))
    halves = _halves(order)
    height = 0.165 * max(map(len, halves)) + 1.1
    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes: Any = figure.subplots(1, len(halves), sharex=True, squeeze=False)
    for ax, rows in zip(axes[0], halves, strict=True):
        _draw(ax, rows, found, contexts)
    axis = (
        f"{score_words(arms)} minus that of {control}, 95 % intervals (linear up to {ZOOM:g}, then "
        f"logarithmic; grey: within {DELTA:g})"
    )
    figure.supxlabel(in_lines(figure, axis, FontProperties(size=8)), fontsize=8)
    looks: list[dict[str, Any]] = [
        {"color": colour, "marker": marker, "fillstyle": fill, "label": name or "decided"}
        for name, (colour, marker, fill) in zip(contexts, cycle(CONTEXTS))
    ]
    handles = [Line2D([], [], linewidth=1.0, markersize=3.6, **look) for look in looks]
    faded = Line2D([], [], color=INK, alpha=FADED, marker="o", linewidth=1.0, markersize=3.6, label="mean undecided")
    above_panels(figure, [*handles, faded], len(handles) + 1, scores_title(arms, board, control))
    return figure


def _mean(rows: dict[str, Any]) -> float:
    return sum(row["difference"] for row in rows.values()) / len(rows)


def _name(key: tuple[str, str], rows: Iterable[dict[str, Any]]) -> str:
    fallen = [str(row["collapse"]).partition(":")[0] for row in rows if row["verdict"].startswith(COLLAPSES)]
    return "  ".join(key) + (f", {' and '.join(fallen)} collapse" if fallen else "")


def _halves(order: Rows) -> list[Rows]:
    """One column of up to 30 rows, else two, cut between precisions where that leaves them nearest to equal."""
    if len(order) <= 30:
        return [order]
    cuts = [i for i in range(1, len(order)) if order[i][0] != order[i - 1][0]] or [len(order) // 2]
    cut = min(cuts, key=lambda i: abs(2 * i - len(order)))
    return [order[:cut], order[cut:]]


def _draw(ax: Axes, rows: Rows, found: dict[tuple[str, str], dict[str, Any]], contexts: Sequence[str]) -> None:
    for y, key in enumerate(rows):
        here = [context for context in contexts if context in found[key]]
        for i, context in enumerate(here):
            row = found[key][context]
            colour, marker, fill = CONTEXTS[contexts.index(context) % len(CONTEXTS)]
            alpha = 1.0 if row["verdict"].endswith(DECIDED) else FADED
            at = y + 0.72 / max(len(here), 2) * (i - (len(here) - 1) / 2)
            if not math.isnan(row["difference_low"]):
                ends = [row["difference_low"], row["difference_high"]]
                ax.plot(ends, [at, at], color=colour, linewidth=1.0, alpha=alpha, solid_capstyle="butt")
            ax.plot(row["difference"], at, color=colour, marker=marker, fillstyle=fill, markersize=3.2, alpha=alpha)  # pyright: ignore[reportArgumentType]
    stripes(ax, [precision for precision, _ in rows])
    ax.axvline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
    ax.set_yticks(range(len(rows)), [_name(key, found[key].values()) for key in rows], fontsize=6.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.axvspan(-DELTA, DELTA, color=REFERENCE, alpha=0.12, zorder=0, linewidth=0)
    ax.set_xscale("symlog", linthresh=ZOOM, linscale=0.8)
    shown = [row for by_context in found.values() for row in by_context.values()]
    is_wide = any(value > 0.3 for row in shown for value in (row["difference"], row["difference_high"]))
    ax.set_xlim(-1.0, 1.0 if is_wide else 0.3)
    ax.set_xticks(TICKS, [f"{tick:g}".replace("0.", ".") for tick in TICKS], fontsize=6.5)
    ax.minorticks_off()
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
