"""Decode rate of low-bit rollouts over BF16 by model size, on an H200 (FlashRL's blog, OpenReview 8MHqvb4lK9).

The rates are those of the throughput map `throughput_h200`: bare vLLM, dense shapes of Qwen2.5, dummy weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.published.figures import THROUGHPUT
from harness.published.figures.drawn import Drawn
from harness.published.figures.marks import note
from harness.report.plots.colours import GREY_85, REFERENCE
from harness.report.plots.style import STYLE
from harness.studies.throughput.cost import baseline_of, decode_ratios
from harness.studies.throughput.figures import LOOKS, compared_sizes, marked_cells
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.records import read_records

CONTEXT = 2048
BATCHES = (8, 64, 256)
FORMATS = ("int8", "fp8_block", "nvfp4", "int4")
REPORTED = {"7b": (1.2, 1.3), "14b": (1.3, 1.56), "32b": (1.7, 1.9)}
"""Size -> lowest and highest INT8 over BF16, by QuRL's authors (arXiv 2602.13953) on A100 and H100."""


def draw(results: Path) -> Drawn:
    """Decode rate over BF16 by size at three batches, with what QuRL's authors report for INT8 behind it.

    Rates that were disturbed, or that waited for the host, are left out: all of 0.5B and 1.5B.
    Raises ValueError where no rate is left.
    """
    sweep = read_sweep(THROUGHPUT)
    records = read_records(results, sweep)
    rows: list[dict[str, Any]] = []
    for size in compared_sizes(sweep, records):
        base = baseline_of(records, size)
        for precision in FORMATS:
            found = dict(decode_ratios(records.get(f"{size}-{precision}", {}), base, BATCHES, CONTEXT))
            marked = marked_cells(records, size, precision)
            rows += [
                {"model": size, "precision": precision, "batch": batch, "over bf16": value}
                for batch, value in found.items()
                if (batch, CONTEXT) not in marked
            ]
    if not rows:
        raise ValueError(f"throughput map {THROUGHPUT}: no format has an undisturbed rate at a context of {CONTEXT}")
    return Drawn(figure=_figure(rows), numbers=pd.DataFrame(rows), says=_says(rows))


def _figure(rows: list[dict[str, Any]]) -> Figure:
    sizes = list(dict.fromkeys(row["model"] for row in rows))
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.9), layout="constrained")
        axes: Any = figure.subplots(1, len(BATCHES), sharey=True)
        for ax, batch in zip(axes, BATCHES, strict=True):
            _panel(ax, [row for row in rows if row["batch"] == batch], sizes)
            ax.set_title(f"batch {batch}")
        axes[0].set_ylabel(f"decode rate over BF16,\ncontext of {CONTEXT} tokens")
        figure.suptitle(_title(rows), fontsize=8.5)
        figure.legend(handles=_handles(rows), loc="outside right center")
        note(
            figure,
            "vLLM 0.24.0 on one H200, shapes of Qwen2.5 with dummy weights. Rates that waited for the host "
            "are left out.\nGrey: INT8 on A100 and H100 as QuRL's authors report it, at a batch that they do not name.",
        )
    return figure


def _panel(ax: Axes, rows: list[dict[str, Any]], sizes: list[str]) -> None:
    for size, (low, high) in REPORTED.items():
        if size in sizes:
            at = sizes.index(size)
            ax.fill_between([at - 0.3, at + 0.3], low, high, color=GREY_85, linewidth=0, zorder=0)
    ax.axhline(1.0, color=REFERENCE, linewidth=0.8, zorder=1)
    for precision in FORMATS:
        found = [(sizes.index(row["model"]), row) for row in rows if row["precision"] == precision]
        look = LOOKS[precision]
        ax.plot([x for x, _ in found], [row["over bf16"] for _, row in found],
                color=look.colour, linestyle=look.dash, marker=look.marker)  # fmt: skip
    ax.set_xticks(range(len(sizes)), [size.upper() for size in sizes])
    ax.set_xlim(-0.5, len(sizes) - 0.5)


def _handles(rows: list[dict[str, Any]]) -> list[Line2D]:
    looks = {precision: LOOKS[precision] for precision in FORMATS if any(row["precision"] == precision for row in rows)}
    lines = [Line2D([], [], color=x.colour, linestyle=x.dash, marker=x.marker, label=name) for name, x in looks.items()]
    return [*lines, Line2D([], [], color=GREY_85, linewidth=5, label="int8, reported")]


def _int8(rows: list[dict[str, Any]]) -> Mapping[str, tuple[float, float]]:
    """Size -> lowest and highest INT8 over BF16 up to a batch of 64."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["precision"] == "int8" and row["batch"] <= 64:
            found.setdefault(row["model"], []).append(row["over bf16"])
    return {size: (min(values), max(values)) for size, values in found.items()}


def _title(rows: list[dict[str, Any]]) -> str:
    found = {size: span for size, span in _int8(rows).items() if size in REPORTED}
    if not found:
        return "Decode rate of low-bit rollouts over BF16, by model size"
    spans = ", ".join(f"{low:.1f} to {high:.1f} ({size.upper()})" for size, (low, high) in found.items())
    return f"INT8 decodes {spans} times the rate of BF16 up to batch 64"


def _says(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(
        f"{size.upper()}: INT8 decodes {low:.2f} to {high:.2f} times as fast as BF16 up to a batch of 64; QuRL's "
        f"authors report {REPORTED[size][0]} to {REPORTED[size][1]}."
        for size, (low, high) in _int8(rows).items()
        if size in REPORTED
    )
