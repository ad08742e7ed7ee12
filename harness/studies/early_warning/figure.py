"""The early-warning figures: how well every signal warns, and how the signals move around the onset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.stats import Floats
from harness.report.plots.colours import BLUE, GREY_56, INK, REFERENCE, VERMILION
from harness.report.plots.save import save_png
from harness.report.plots.style import close_grid
from harness.studies.early_warning.alarms import REWARD_DROP, SIGNALS, Trace
from harness.studies.early_warning.scores import SLOW, Score

BEFORE, AFTER = 30, 10
"""Steps around the onset."""


def draw(runs: Sequence[Trace], scores: Sequence[Score], folder: Path) -> list[Path]:
    """`signals.png` and `onset.png`."""
    return save_png(lambda: _signals(scores), folder / "signals.png") + save_png(
        lambda: _onset(runs), folder / "onset.png"
    )


def _signals(scores: Sequence[Score]) -> Figure:
    """One row per statistic: recall, lead and gain with intervals; the false-alarm rate as a line."""
    figure = Figure(figsize=(6.9, 0.19 * len(scores) + 1.0), layout="constrained")
    axes: Any = figure.subplots(1, 4, sharey=True, width_ratios=(1, 1, 1, 0.8))
    rows = range(len(scores))
    for ax, name, title in ((axes[0], "recall", "warned of"), (axes[1], "lead", "lead, steps"),
                            (axes[2], "gain", "gain on reward, steps")):  # fmt: skip
        for y, s in enumerate(scores):
            colour = VERMILION if s.name == REWARD_DROP else INK if name != "gain" or s.gain_low > 0 else GREY_56
            low, high = getattr(s, f"{name}_low"), getattr(s, f"{name}_high")
            ax.plot([low, high], [y, y], color=colour, linewidth=1.0, solid_capstyle="butt")
            ax.plot(getattr(s, name), y, "o", color=colour, markersize=3.4)
        ax.set_title(title)
    axes[0].set_xlim(-0.02, 1.02)
    axes[2].axvline(0, color=REFERENCE, linewidth=0.8)
    for y, s in enumerate(scores):
        axes[0].plot(s.false_alarms, y, "|", color=VERMILION, markersize=6)
        axes[3].plot(s.hidden, y, "D", color=BLUE, markersize=3.2)
    axes[3].set_title("hidden losses")
    axes[3].set_xlim(-0.02, 1.02)
    axes[0].set_yticks(rows, [s.name for s in scores], fontsize=6.5)
    axes[0].set_ylim(len(scores) - 0.4, -0.6)
    for ax in axes:
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    handles = [
        Line2D(
            [], [], color=INK, marker="o", markersize=3.4, linewidth=1.0, label=f"collapses from step {SLOW} on, 95 %"
        ),
        Line2D([], [], color=VERMILION, marker="|", linestyle="", markersize=6, label="healthy runs that alarm"),
        Line2D([], [], color=BLUE, marker="D", linestyle="", markersize=3.2, label="alarmed at any step"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _onset(runs: Sequence[Trace]) -> Figure:
    """Levels around the onset, in units of the spread of healthy runs at the same step and setting."""
    names = [REWARD_DROP, *(f"{name} (level)" for name in SIGNALS if not name.endswith("down"))]
    slow = [run for run in runs if run.onset is not None and run.onset >= SLOW]
    names = [name for name in names if any(name in run.statistics for run in slow)]
    columns = 4
    figure = Figure(figsize=(6.9, 1.35 * -(-len(names) // columns) + 0.4), layout="constrained")
    axes: Any = figure.subplots(-(-len(names) // columns), columns, sharex=True, squeeze=False)
    at = np.arange(-BEFORE, AFTER + 1)
    for ax, name in zip(axes.flat, names, strict=False):
        values = np.array([_around(run, name, runs) for run in slow if name in run.statistics])
        counts = np.isfinite(values).sum(axis=0)
        shown = counts >= 3
        if not shown.any():
            continue
        low, middle, high = np.nanquantile(values[:, shown], [0.25, 0.5, 0.75], axis=0)
        ax.fill_between(at[shown], low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(at[shown], middle, color=BLUE)
        ax.axhline(0, color=REFERENCE, linewidth=0.8, linestyle="--")
        ax.axvline(0, color=VERMILION, linewidth=0.9)
        ax.set_title(name.removesuffix(" (level)").removesuffix(" up"))
    close_grid(axes, len(names))
    figure.supxlabel(f"steps from the onset (collapses from step {SLOW} on; median and quartiles)", fontsize=8)
    figure.supylabel("distance from healthy runs of the setting, s.d.", fontsize=8)
    return figure


def _around(run: Trace, name: str, runs: Sequence[Trace]) -> Floats:
    """[BEFORE + 1 + AFTER] z-scores against the healthy runs at the same step; NaN outside the run."""
    values, healthy = run.statistics[name], _healthy(run.context, name, runs)
    width = min(len(values), healthy.shape[1])
    found = np.full(BEFORE + AFTER + 1, np.nan)
    assert run.onset is not None
    for k, step in enumerate(range(run.onset - BEFORE, run.onset + AFTER + 1)):
        if 0 <= step < width:
            there = healthy[:, step]
            spread = np.nanstd(there) if np.isfinite(there).sum() > 1 else np.nan
            found[k] = (values[step] - np.nanmean(there)) / spread if spread > 0 else np.nan
    return found


def _healthy(context: str, name: str, runs: Sequence[Trace]) -> Floats:
    """[runs, steps], cut to the shortest."""
    rows = [r.statistics[name] for r in runs if r.context == context and r.kind == "healthy" and name in r.statistics]
    width = min(map(len, rows), default=0)
    return np.array([row[:width] for row in rows]).reshape(len(rows), width)
