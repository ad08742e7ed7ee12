"""The figure of single bases: every run's accuracy above the base that it started from, and which runs collapsed.

A column is a base, a point a run, its colour the method; in a column methods stand side by side. Left out: formats,
which the tables have, and intervals, for a point is one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.arms import Arm
from harness.records.run_result import Base, base_names
from harness.report.plots.colours import REFERENCE
from harness.report.plots.style import Looks, above_panels, style_name
from harness.report.scores import score_arm

MIN_BASES = 4
"""Bases of a context below which a table says it as well."""
SPREAD = 0.6
"""Width of a column over which the methods stand, of the distance between two."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    base: Base
    start: float
    """Accuracy before training, in the reference precision."""
    accuracy: float
    """Mean accuracy of the evaluations after the start, likewise."""
    has_collapsed: bool


def points_of(arms: Sequence[Arm]) -> dict[str, list[Point]]:
    """Method and variant -> its runs, the formats together."""
    found: dict[str, list[Point]] = {}
    for arm in arms:
        for ((base, _), _), run in score_arm(arm).outcomes["reference"].items():
            point = Point(base=base, start=run.start, accuracy=run.value, has_collapsed=run.has_collapsed)
            found.setdefault(style_name(arm), []).append(point)
    return found


def bases(arms: Sequence[Arm], looks: Looks) -> Figure | None:
    """The figure for the arms of one context; None with fewer than `MIN_BASES` bases, or where no run collapsed."""
    found = points_of(arms)
    columns = sorted({point.base for points in found.values() for point in points})
    if len(columns) < MIN_BASES or not any(point.has_collapsed for points in found.values() for point in points):
        return None
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    ax = figure.subplots()
    for index, (name, points) in enumerate(found.items()):
        shift = SPREAD * (index / (len(found) - 1) - 0.5) if len(found) > 1 else 0.0
        for point in points:
            ax.plot(
                columns.index(point.base) + shift, point.accuracy, color=looks[name].colour, marker=looks[name].marker,
                fillstyle="none" if point.has_collapsed else "full", markersize=5.0, linestyle="",
            )  # fmt: skip
    for point in (point for points in found.values() for point in points):
        at = columns.index(point.base)
        ax.plot([at - 0.45, at + 0.45], [point.start] * 2, color=REFERENCE, linewidth=0.8, zorder=1)
    ax.set_xticks(range(len(columns)), base_names(columns))
    ax.set_ylim(bottom=0.0)
    ax.set_ylabel("mean accuracy after the start")
    ax.grid(axis="x", visible=False)
    handles = [
        Line2D([], [], color=looks[name].colour, marker=looks[name].marker, linestyle="", label=name) for name in found
    ]
    handles += [
        Line2D([], [], color=REFERENCE, marker="o", fillstyle="none", linestyle="", label="hollow: collapsed"),
        Line2D([], [], color=REFERENCE, linewidth=0.8, label="start"),
    ]
    above_panels(figure, handles, 5, title(found))
    return figure


def title(found: Mapping[str, Sequence[Point]]) -> str:
    """Share of the runs of each method that collapsed, the largest first."""
    counts = {name: sum(point.has_collapsed for point in points) for name, points in found.items()}
    ranked = sorted(counts, key=lambda name: -counts[name] / len(found[name]))
    return "Runs that collapse: " + ", ".join(f"{counts[name]} of {len(found[name])} {name}" for name in ranked)
