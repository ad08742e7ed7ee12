"""The figure of `harness.devtools.bench.coverage`: coverage by number of seeds, a panel per world."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.save import save_png

INTERVALS = {
    "mean": "bootstrap of the mean, seeds and questions",
    "iqm": "bootstrap of the IQM, seeds and questions",
    "paired": "paired t over seeds, these questions",
    "crossed": "seeds and questions crossed",
    "paired_new": "control: paired t over seeds, held against new questions",
    "improvement": "P(X > Y), score interval",
    "improvement_two": "P(X > Y), score interval, two settings",
    "improvement_bootstrap": "control: P(X > Y), percentile bootstrap",
    "profile": "performance profile, band over all thresholds",
}
"""Interval whose coverage is simulated -> what table and figure call it."""
LOOKS: dict[str, tuple[str, Any, str]] = {
    "mean": ("#202020", "-", "o"),
    "iqm": ("#808080", (0, (5, 1.5)), "s"),
    "paired": ("#0072B2", "-", "^"),
    "crossed": ("#009E73", "-", "D"),
    "paired_new": ("#D55E00", (0, (1.2, 1.2)), "X"),
    "improvement": ("#0072B2", "-", "o"),
    "improvement_two": ("#56B4E9", (0, (5, 1.5)), "s"),
    "improvement_bootstrap": ("#D55E00", (0, (1.2, 1.2)), "X"),
    "profile": ("#009E73", "-", "D"),
}
"""(colour, dash, marker); the controls that must fail are vermilion and dotted."""
LOWEST = 0.6


def draw(found: Mapping[str, Mapping[int, Mapping[str, float]]], path: Path) -> list[Path]:
    """Draw the figure: its files. `found`: world -> seeds -> interval -> coverage."""
    return save_png(lambda: _figure(found), path)


def _figure(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Figure:
    figure = Figure(figsize=(6.75, 4.4), layout="constrained")
    axes: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for ax, (world, by_size) in zip(axes.flat, found.items(), strict=True):
        ax.axhspan(0.94, 0.96, color="#E8E8E8", linewidth=0, zorder=0)
        ax.axhline(0.95, color="#707070", linewidth=0.8, linestyle="--", zorder=1)
        sizes = list(by_size)
        for name in (name for name in INTERVALS if name in by_size[sizes[0]]):
            colour, dash, marker = LOOKS[name]
            values = [by_size[size][name] for size in sizes]
            ax.plot(sizes, [max(value, LOWEST) for value in values], color=colour, linestyle=dash, marker=marker,
                    markersize=3.6, linewidth=1.0, clip_on=False)  # fmt: skip
        ax.set_title(world)
        ax.set_ylim(LOWEST, 1.005)
        ax.set_xticks(sizes)
    figure.supxlabel("seeds per arm", fontsize=8)
    figure.supylabel(f"share of 95 % intervals that hold the truth (below {LOWEST:g}: at the foot)", fontsize=8)
    handles = [
        Line2D(
            [], [], color=colour, linestyle=dash, marker=marker, markersize=3.6, linewidth=1.0, label=INTERVALS[name]
        )
        for name, (colour, dash, marker) in LOOKS.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=6.5)
    return figure
