"""The break-even figure: speedup end to end over model size and response length, with the line where it is 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from harness.report.plots.colours import BLUE, INK, REFERENCE, STRIPE, VERMILION
from harness.report.plots.profiles import BASELINE
from harness.report.plots.save import save_png
from harness.studies.break_even.answer import Answer
from harness.studies.break_even.laws import LENGTH_REACH, SIZE_REACH

MAX_PANELS = 12
TICKS = ((1.0, 1.25, 1.5), (1.0, 1.5, 2.0), (1.0, 2.0, 4.0))
"""Speedups marked on the colour scale, and their inverses; the first scale that holds every map is taken."""


def draw(answers: Sequence[Answer], path: Path) -> list[Path]:
    """A panel per arm: a map where sizes and lengths vary, a curve where one of them does."""
    plain = [a for a in answers if a.name.startswith(f"{BASELINE} ")]  # of many arms, the formats themselves
    shown = answers if len(answers) <= MAX_PANELS or not plain else plain
    return save_png(lambda: _figure(shown[:MAX_PANELS]), path)


def _figure(answers: Sequence[Answer]) -> Figure:
    columns = min(3, len(answers))
    rows = math.ceil(len(answers) / columns)
    figure = Figure(figsize=(2.3 * columns + 0.8, 2.05 * rows + 0.6), layout="constrained")
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    axis = ""
    maps = [_speedups(answer)[2] for answer in answers if len(answer.crossings) == 2]
    widest = max((float(np.abs(value).max()) for value in maps), default=0.0)
    ticks = next((t for t in TICKS if widest <= math.log2(t[-1])), TICKS[-1])
    for ax, answer in zip(axes.flat, answers, strict=False):
        ax.set_title(answer.name)
        if len(answer.crossings) == 2:
            image = _map(ax, answer, math.log2(ticks[-1]))
        elif answer.crossings:
            axis = answer.crossings[0].axis
            _curve(ax, answer)
    for ax in axes.flat[len(answers) :]:
        ax.set_axis_off()
    if image is not None:
        bar = figure.colorbar(image, ax=axes, label="speedup of a step", shrink=0.8)
        slower = [(-math.log2(x), f"1/{x:g}") for x in reversed(ticks[1:])]
        marks = [*slower, *((math.log2(x), f"{x:g}") for x in ticks)]
        bar.set_ticks([at for at, _ in marks], labels=[words for _, words in marks])
        figure.supxlabel("parameters", fontsize=8)
        figure.supylabel("response, tokens", fontsize=8)
    else:
        figure.supxlabel("parameters" if axis == "size" else "response, tokens", fontsize=8)
        figure.supylabel("speedup of a step", fontsize=8)
    figure.suptitle("hatched: beyond what was measured", fontsize=8)
    return figure


def _speedups(answer: Answer) -> tuple[Any, Any, Any]:
    """(parameters [80], response tokens [80], log2 of the speedup [80, 80]) of a map."""
    sizes, lengths = (np.array(x) for x in list(zip(*answer.measured, strict=True))[:2])
    n = np.geomspace(sizes.min(), sizes.max() * SIZE_REACH, 80)
    length = np.geomspace(lengths.min(), lengths.max() * LENGTH_REACH, 80)
    return n, length, np.log2(answer.speedup(n[None, :], length[:, None]))


def _map(ax: Axes, answer: Answer, top: float) -> Any:
    sizes, lengths = (np.array(x) for x in list(zip(*answer.measured, strict=True))[:2])
    n, length, value = _speedups(answer)
    image = ax.pcolormesh(n, length, value.clip(-top, top), cmap="PuOr", norm=TwoSlopeNorm(0, -top, top),
                          shading="gouraud", rasterized=True)  # fmt: skip
    if value.min() < 0 < value.max():
        ax.contour(n, length, value, levels=[0.0], colors=[INK], linewidths=1.4)
    for x, y, width, height in (
        (sizes.max(), lengths.min(), n[-1], length[-1]),
        (sizes.min(), lengths.max(), sizes.max(), length[-1]),
    ):
        ax.add_patch(
            Rectangle((x, y), width - x, height - y, fill=False, hatch="////", edgecolor="#80808070", linewidth=0)
        )
    ax.plot(sizes, lengths, "o", color=INK, markersize=3, markerfacecolor="white", clip_on=False)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.grid(visible=False)
    return image


def _curve(ax: Axes, answer: Answer) -> None:
    line = answer.crossings[0]
    x = np.geomspace(line.measured[0], line.reach, 100)
    y = answer.speedup.along(line.axis, line.at, x)
    inside = x <= line.measured[1]
    ax.plot(x[inside], y[inside], color=BLUE)
    ax.plot(x[~inside], y[~inside], color=BLUE, linestyle=":")
    at = 0 if line.axis == "size" else 1
    ax.plot([m[at] for m in answer.measured], [m[2] for m in answer.measured], "o", color=INK, markersize=3.5)
    ax.axhline(1.0, color=REFERENCE, linewidth=0.8, linestyle="--")
    ax.axvspan(line.measured[1], line.reach, color=STRIPE, linewidth=0, zorder=0)
    if line.value is not None:
        ax.axvline(line.value, color=VERMILION, linewidth=1.0)
    ax.set_xscale("log")
    marks = sorted({float(f"{m[at]:.2g}") for m in answer.measured})
    ax.set_xticks(marks, labels=[f"{mark:.3g}" for mark in marks])
    ax.set_ylim(0, max(1.2, float(y.max()) * 1.1, *(m[2] * 1.1 for m in answer.measured)))
    ax.minorticks_off()
