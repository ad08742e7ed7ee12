"""The replay figure: bias, cosine and variance of every correction, by format and length of the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.report.plots.colours import (
    BLUE,
    GREEN,
    GREY_63,
    GREY_69,
    GREY_89,
    GREY_93,
    GREY_97,
    INK,
    ORANGE,
    PINK,
    REFERENCE,
    SKY,
    VERMILION,
)
from harness.report.plots.save import save
from harness.report.plots.style import STYLE
from harness.studies.replay.store import CONTROL

Row = dict[str, Any]
FAMILIES = (
    ("none", "none", INK, "o"),
    ("none bypass_ppo", "none, sampler as old policy", PINK, "P"),
    ("bf16_tis", "token TIS, cap 2", BLUE, "s"),
    ("icepop", "IcePop, token band", SKY, "D"),
    ("verl_decoupled_seq_is", "sequence TIS, cap 2", ORANGE, "^"),
    ("mis", "MIS, sequences above 3 dropped", VERMILION, "v"),
    ("sequence IS, no cap", "sequence ratio, no cap", GREEN, "X"),
)
"""(arm, name, colour, marker): the kinds of rule that stand out; every other arm is a small grey mark."""
MEASURES = (
    ("bias", "bias over exact step", True),
    ("cosine", "cosine with exact step", False),
    ("variance_ratio", "variance ratio", True),
)
"""(column, label, whether its axis is logarithmic)."""
LOWEST_BIAS = 0.03
"""Smallest bias on the axis: one below it is drawn here, hollow."""
UNKNOWN = 0.8
"""Width of a cosine's interval from which its marker is hollow."""
LIMITS = {"bias": (LOWEST_BIAS * 0.8, 3.0), "cosine": (-0.15, 1.08), "variance_ratio": (0.008, 30.0)}
"""Axes; the rules that keep next to nothing (cosine unknown, variance next to 0) leave them."""


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """One figure per age of the batches, `age<k>.png`."""
    with mpl.rc_context(fname=STYLE):
        return [
            save(panels([record for record in records if record["age"] == age]), folder / f"age{age}.png")
            for age in sorted({record["age"] for record in records})
        ]


def panels(records: Sequence[dict[str, Any]]) -> Figure:
    """Rows of panels are measures, columns are contexts (lengths); formats stand side by side in each."""
    contexts = list(dict.fromkeys(record["context"] for record in records))
    figure = Figure(figsize=(max(5.6, 2.9 * len(contexts)), 5.8), layout="constrained")
    axes = figure.subplots(len(MEASURES), len(contexts), sharex="col", sharey="row", squeeze=False)
    for column, context in enumerate(contexts):
        inside = [record for record in records if record["context"] == context]
        for ax, measure in zip(axes[:, column], MEASURES, strict=True):
            _panel(ax, inside, measure)
        axes[0, column].set_title(_title(inside[0]))
        names = [record["sampler"]["sampler"] for record in inside]
        axes[-1, column].set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    for ax, (_, label, _) in zip(axes[:, 0], MEASURES, strict=True):
        ax.set_ylabel(label)
    shown = {row["arm"] for record in records for row in record["rows"]}
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, linestyle="-", linewidth=1.0, label=name)
        for arm, name, colour, marker in FAMILIES
        if arm in shown
    ]
    handles.append(Line2D([], [], color=GREY_69, marker="_", linestyle="", label="every other arm"))
    handles.append(Patch(color=GREY_93, label="within noise of zero bias"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(contexts) + 1))
    return figure


def _title(record: dict[str, Any]) -> str:
    task, length = record["config"]["task"]["name"], record["sampler"]["length"]
    return f"{task}, n = {length}" if length else task


def _panel(ax: Axes, records: Sequence[dict[str, Any]], measure: tuple[str, str, bool]) -> None:
    column, _, is_log = measure
    known = [arm for arm, *_ in FAMILIES]
    for x, record in enumerate(records):
        rows: dict[str, Row] = {row["arm"]: row for row in record["rows"]}
        if x % 2 == 0:
            ax.axvspan(x - 0.5, x + 0.5, color=GREY_97, zorder=0, linewidth=0)
        if column == "bias" and "none" in rows:
            floor = max(rows["none"]["bias_floor"], LOWEST_BIAS)
            ax.fill_between([x - 0.5, x + 0.5], LOWEST_BIAS, floor, color=GREY_89, linewidth=0, zorder=0.5)
        others = [row[column] for arm, row in rows.items() if arm not in known and not row["same_as"]]
        places = x + np.linspace(-0.36, 0.36, max(len(others), 2))[: len(others)]
        ax.plot(
            places,
            [_shown(value, column) for value in sorted(map(_value, others))],
            "_",
            color=GREY_69,
            markersize=3,
            zorder=1,
        )
        for i, (arm, _, colour, marker) in enumerate(FAMILIES):
            if arm in rows:
                _point(ax, x + 0.72 * (i / (len(FAMILIES) - 1) - 0.5), rows[arm], column, colour, marker)
    if is_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    ax.set_ylim(*LIMITS[column])
    ax.set_xlim(-0.5, len(records) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.axhline(1.0, color=REFERENCE, linewidth=0.6, zorder=0.8)
    ax.tick_params(axis="x", length=0)
    if any(record["sampler"]["sampler"] == CONTROL for record in records):
        ax.axvline(0.5, color=GREY_63, linewidth=0.6)


def _point(ax: Axes, x: float, row: Row, column: str, colour: str, marker: str) -> None:
    value = _shown(_value(row[column]), column)
    if f"{column}_low" in row:
        ends = [_shown(_value(row[f"{column}_{end}"]), column) for end in ("low", "high")]
        ax.plot([x, x], ends, color=colour, linewidth=0.9, alpha=0.75, zorder=2, solid_capstyle="butt")
    is_hollow = column == "bias" and _value(row[column]) < LOWEST_BIAS
    if column == "cosine":  # of a step that is nearly nothing, or of one that few batches tell
        is_hollow = _value(row["cosine_high"]) - _value(row["cosine_low"]) > UNKNOWN
    ax.plot(x, value, marker=marker, color=colour, markersize=3.4, fillstyle="none" if is_hollow else "full", zorder=3)


def _value(value: float | None) -> float:
    return math.nan if value is None else value


def _shown(value: float, column: str) -> float:
    return max(value, LOWEST_BIAS) if column == "bias" else value
