"""The figure of natural mismatch: k3 by format, a mark for every task, length, size and engine; published values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure

from harness.published.mismatch.ours import Row
from harness.published.mismatch.values import Published
from harness.report.plots.colours import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, VERMILION, VIOLET
from harness.report.plots.save import save_png

FORMATS = ("fp16", "bf16", "w8a16", "fp8_block", "fp8_channel", "fp8_block+kv8", "int8", "nvfp4", "int4", "mxfp4")
COLOURS = (BLUE, GREEN, VERMILION, ORANGE, PINK, SKY, VIOLET, GREY)
MARKS = {0.0: "o", 0.5: "s", 1.0: "D"}
"""Mark by the channel spread of the weights; a triangle for others."""
LEAST = 1e-7
WIDTH = 105
"""Characters of a line of the title."""


def draw(rows: Sequence[Row], values: Sequence[Published], title: str, path: Path) -> list[Path]:
    """Write the figure."""
    return save_png(lambda: figure_of(rows, values, title), path)


def figure_of(rows: Sequence[Row], values: Sequence[Published], title: str) -> Figure:
    """Formats to the right, k3 upwards; full marks are vLLM's kernels, hollow ones emulated; their shape is the
    spread. Bars in ink: published."""
    figure: Any = Figure(figsize=(6.9, 3.8), layout="constrained")
    ax = figure.subplots()
    names = [name for name in FORMATS if any(row.format == name for row in rows)]
    lengths = {(r.task, r.n, r.parameters, r.engine): round(r.length) for r in rows if r.format == "bf16"}
    kinds = list(lengths)
    for number, kind in enumerate(kinds):
        shift = 0.6 * ((number + 0.5) / len(kinds) - 0.5)
        colour, is_real = COLOURS[number % len(COLOURS)], kind[3] == "vllm"
        look: dict[str, Any] = {"color": colour, "markersize": 3.6, "markerfacecolor": colour if is_real else "white"}
        for row in rows:
            if (row.task, row.n, row.parameters, row.engine) == kind and row.format in names:
                x = names.index(row.format) + shift
                ax.plot([x, x], [row.k3_low, row.k3_high], color=colour, linewidth=0.9)
                ax.plot(x, row.k3, MARKS.get(row.spread, "^"), **look)
        task = "word problems" if kind[0] == "wordmath" else "sorting"
        words = f"{task}, {lengths[kind]} tokens, {kind[2] / 1e6:.2g}M{'' if is_real else ', emulated'}"
        ax.plot([], [], "o", label=words, **look)
    for spread in sorted({row.spread for row in rows if row.format in names}):
        ax.plot([], [], MARKS.get(spread, "^"), color=INK, markersize=3.6, label=f"spread of the channels {spread:g}")
    label = "published, real models"
    for value in values:
        for name in value.formats:
            if value.unit == "token" and name in names:
                x = names.index(name)
                ax.fill_between([x - 0.42, x + 0.42], max(value.low, LEAST) / 1.06, value.high * 1.06, color=INK,
                                alpha=0.16, linewidth=0, label=label)  # fmt: skip
                label = "_"
    ax.set_yscale("log")
    ax.set_xticks(range(len(names)), names, rotation=25, ha="right")
    ax.set_ylabel("k3 a token before training, nats")
    ax.set_title("\n".join(wrap(title, WIDTH)), fontsize=7.5)
    ax.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=6)
    return figure
