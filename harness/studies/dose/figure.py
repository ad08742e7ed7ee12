"""The figure of the dose: every run, the mean of every bin with its interval, and collapses as a rate."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from harness.report.plots.colours import BLUE, GREY_69, INK, NOTE, REFERENCE, VERMILION
from harness.report.plots.save import save_png
from harness.studies.dose.curve import fitted
from harness.studies.dose.points import NONE, Point, correction_words
from harness.studies.dose.study import TESTED, Study, alive, finding

COLOURS = {NONE: VERMILION, "TIS": BLUE}
KINDS = {"fixed noise": "D", "fresh noise": "v", "staleness": "X"}
"""Mark of a kind of dose."""
MARKS = {"embedded": ("o", "emulated"), "vllm": ("^", "vLLM's kernels")}


def draw(s: Study, path: Path) -> list[Path]:
    """Write the figure, a column for each of TESTED that has runs: loss above, rate of collapse below."""
    return save_png(lambda: _figure(s), path)


def _figure(s: Study) -> Figure:
    names = [name for name in TESTED if any(p.correction == name for p in s.points)]
    figure = Figure(figsize=(6.9, 3.6), layout="constrained")
    axes: Any = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1))
    for column, name in enumerate(names):
        _losses(axes[0][column], s, name)
        _collapses(axes[1][column], s, name)
    axes[0][0].set_ylabel("lost accuracy")
    axes[1][0].set_ylabel("collapsed")
    figure.suptitle("\n".join(textwrap.wrap(finding(s), 85)), fontsize=8)
    note = "squares: means of bins with simultaneous 95 % intervals; each grey mark is a run that did not collapse"
    figure.supxlabel(note, fontsize=6, color=NOTE)
    return figure


def _losses(ax: Any, s: Study, correction: str) -> None:
    colour, own = COLOURS[correction], alive(s.points, correction)
    doses, losses = np.array([p.dose for p in own]), np.array([p.loss for p in own])
    engines = np.array([p.engine for p in own])
    for engine, (mark, words) in MARKS.items():
        at = engines == engine
        ax.plot(doses[at], losses[at], mark, color=GREY_69, markersize=2.4, label=words)
    x, y = fitted(doses, losses)
    ax.plot(x, y, color=colour, linewidth=0.9, drawstyle="steps-post", label="never-falling curve")
    for b in (b for b in s.bins if b.correction == correction):
        ax.plot([b.dose, b.dose], [b.loss_low, b.loss_high], color=colour, linewidth=1.4)
        ax.plot(b.dose, b.loss, "s", color=colour, markersize=4)
    others = [p for p in s.others if p.correction == correction]
    if others:
        x, y = [p.dose for p in others], [p.loss for p in others]
        ax.plot(x, y, "P", color=INK, markersize=4, label=others[0].task)
    for kind, mark in KINDS.items():
        means = _means([p for p in s.dosed if (p.kind, p.correction) == (kind, correction)])
        if means:
            ax.plot(*zip(*means, strict=True), mark, color=INK, markersize=3.5, label=kind)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    ax.set_title(correction_words(correction))
    ax.set_xscale("log")
    ax.legend(loc="upper left", fontsize=6)


def _means(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(median dose, mean loss) of every amount of a kind, over its runs that did not collapse."""
    groups: dict[str, list[Point]] = {}
    for p in points:
        if not p.has_collapsed:
            groups.setdefault(p.source, []).append(p)
    return [(median(p.dose for p in own), fmean(p.loss for p in own)) for own in groups.values()]


def _collapses(ax: Any, s: Study, correction: str) -> None:
    for b in (b for b in s.bins if b.correction == correction):
        ax.plot([b.dose, b.dose], [b.collapsed.low, b.collapsed.high], color=COLOURS[correction], linewidth=1.2)
        ax.plot(b.dose, b.collapsed.count / b.collapsed.total, "s", color=COLOURS[correction], markersize=3)
    ax.set_xlabel("dose: k3 x length, nats a response")
    ax.set_ylim(-0.05, 1.05)
