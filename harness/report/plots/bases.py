"""The figure of single bases: every run's accuracy above the base that it started from, and which runs collapsed.

A column is a base, a point a run, its colour the method; in a column methods stand side by side. Left out: formats,
which the tables have, and intervals, for a point is one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.arms import Arm
from harness.records.run_result import Base, base_names
from harness.records.stats import Outcome
from harness.report.plots.colours import REFERENCE
from harness.report.plots.style import Looks, above_panels, shift_of, style_name
from harness.report.plots.titles import score_words
from harness.report.scores import score_arm

MIN_BASES = 4
"""Bases of a context below which a table says it as well."""
MAX_CLEAR = 3
"""Methods of which no run collapsed that the title names."""
SPREAD = 0.6
"""Width of a column over which the methods stand, of the distance between two."""


Runs = Sequence[tuple[Base, Outcome]]


def runs_of(arms: Sequence[Arm]) -> dict[str, list[tuple[Base, Outcome]]]:
    """Method and variant -> its runs in the reference precision, the formats together."""
    found: dict[str, list[tuple[Base, Outcome]]] = {}
    for arm in arms:
        for ((base, _), _), run in score_arm(arm).outcomes["reference"].items():
            found.setdefault(style_name(arm), []).append((base, run))
    return found


def bases(arms: Sequence[Arm], looks: Looks) -> Figure | None:
    """The figure for the arms of one context; None with fewer than `MIN_BASES` bases, or where no run collapsed."""
    found = runs_of(arms)
    starts = {base: run.start for runs in found.values() for base, run in runs}
    columns = sorted(starts)
    if len(columns) < MIN_BASES or not any(run.has_collapsed for runs in found.values() for _, run in runs):
        return None
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    ax = figure.subplots()
    for index, (name, runs) in enumerate(found.items()):
        shift = shift_of(index, len(found), SPREAD)
        for base, run in runs:
            ax.plot(
                columns.index(base) + shift, run.value, color=looks[name].colour, marker=looks[name].marker,
                fillstyle="none" if run.has_collapsed else "full", markersize=5.0, linestyle="",
            )  # fmt: skip
    for at, base in enumerate(columns):
        ax.plot([at - 0.45, at + 0.45], [starts[base]] * 2, color=REFERENCE, linewidth=0.8, zorder=1)
    ax.set_xticks(range(len(columns)), base_names(columns))
    ax.set_ylim(bottom=0.0)
    ax.set_ylabel(score_words(arms))
    ax.grid(axis="x", visible=False)
    handles = [
        Line2D([], [], color=looks[name].colour, marker=looks[name].marker, linestyle="", label=name) for name in found
    ]
    handles += [
        Line2D([], [], color=REFERENCE, marker="o", fillstyle="none", linestyle="", label="hollow: collapsed"),
        Line2D([], [], color=REFERENCE, linewidth=0.8, label="start"),
    ]
    above_panels(figure, handles, 6, title(found))
    return figure


def title(found: Mapping[str, Runs]) -> str:
    """Share of the runs of each method that collapsed, the largest first; many without one are told together."""
    counts = {name: sum(run.has_collapsed for _, run in runs) for name, runs in found.items()}
    ranked = sorted(counts, key=lambda name: -counts[name] / len(found[name]))
    clear = [name for name in ranked if not counts[name]]
    if len(clear) <= MAX_CLEAR:
        clear = []
    told = [f"{counts[name]} of {len(found[name])} {name}" for name in ranked if name not in clear]
    others = f"; 0 of {sum(len(found[name]) for name in clear)} with {len(clear)} others" if clear else ""
    return "Runs that collapse: " + ", ".join(told) + others
