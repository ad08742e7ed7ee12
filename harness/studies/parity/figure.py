"""The figure of parity: per format, how |differences of log-probs| are distributed between the three scorers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.colours import BLUE, GREY, VERMILION
from harness.report.plots.save import save_png
from harness.studies.parity.record import FORMATS, Record
from harness.studies.parity.statistics import LEVELS, PAIRS, key

COLOURS = {"vllm-embedded": BLUE, "vllm-fp32": VERMILION, "embedded-fp32": GREY}
NAMES = {"vllm-embedded": "vLLM - embedded", "vllm-fp32": "vLLM - float32", "embedded-fp32": "embedded - float32"}
FLOOR = 1e-6
"""Nats drawn as zero: below the last bit of a float32 log-prob near 10."""


def draw(records: Mapping[str, Record], path: Path) -> None:
    """Write the figure, one panel per device."""
    save_png(lambda: panels(records), path)


def panels(records: Mapping[str, Record]) -> Figure:
    """Formats downwards, nats to the right: thin from the 10th to the 90th percentile, thick the middle half."""
    measured = {device: _ok(record) for device, record in sorted(records.items())}
    names = [name for name in FORMATS if any(name in rows for rows in measured.values())]
    figure = Figure(figsize=(6.75, 0.9 + 0.3 * max(len(names), 1)), layout="constrained")
    axes = figure.subplots(1, max(len(measured), 1), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (device, rows) in zip(axes, measured.items(), strict=False):
        _panel(ax, rows, names)
        ax.set_title(f"{device}: {records[device]['hardware'].get('gpu') or records[device]['engine']}")
    handles = [Line2D([], [], color=colour, marker="o", label=NAMES[pair]) for pair, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _ok(record: Record) -> dict[str, Any]:
    return {name: row for name, row in record["formats"].items() if row["status"] == "ok"}


def _panel(ax: Axes, rows: Mapping[str, Any], names: list[str]) -> None:
    for place, name in enumerate(names):
        for shift, pair in enumerate(map(key, PAIRS)) if name in rows else ():
            values = [max(value, FLOOR) for value in rows[name]["pairs"][pair]["percentiles"]]
            at = dict(zip(LEVELS, values, strict=True))
            y, colour = place + 0.25 * (shift - 1), COLOURS[pair]
            ax.plot([at[10], at[90]], [y, y], color=colour, lw=0.8)
            ax.plot([at[25], at[75]], [y, y], color=colour, lw=2.6, solid_capstyle="butt")
            ax.plot(at[50], y, "o", color=colour, ms=3, mec="white", mew=0.5)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel("|difference of log-probs| per token, nats")
