"""The figure of probes: k3 by format with the floor, and its profiles over position, entropy and length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.plots.colours import (
    BLUE,
    GREEN,
    GREY,
    INK,
    NOTE,
    ORANGE,
    PINK,
    REFERENCE,
    SKY,
    VERMILION,
    VIOLET,
)
from harness.report.plots.save import save_png
from harness.studies.probe.record import FLOOR, Record

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, VIOLET, GREY)
DASHES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v")
LEAST = 1e-9
"""Nats drawn as zero."""
PROFILES = (
    ("by_position", "position", "k3", "k3 a token, nats", "token of the answer"),
    ("by_entropy", "entropy", "k3", "k3 a token, nats", "entropy of the trainer, nats"),
    ("ess_by_length", "length", "ess", "effective sample size", "tokens of the answer"),
)
"""Profile, its x and y, and their words."""
ENTROPY_ZERO = 3e-4
"""Place of the bucket from entropy 0 on an axis of logarithms."""


def draw(records: Sequence[Record], path: Path) -> list[Path]:
    """Write the figure: k3 of all probes, profiles of the last."""
    return save_png(lambda: figure_of(records), path)


def figure_of(records: Sequence[Record]) -> Figure:
    """Above: k3 of every format, folder by folder, over the range of the floor. Below: profiles of the last probe."""
    figure = Figure(figsize=(6.9, 5.2), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    _all(above.subplots(), records)
    last = records[-1]
    axes: Any = below.subplots(1, len(PROFILES), squeeze=False)
    for ax, (profile, x, y, label, axis) in zip(axes.flat, PROFILES, strict=True):
        for look, row in zip(_looks(), last["formats"], strict=False):
            at = [(max(a, ENTROPY_ZERO) if x == "entropy" else a, b)
                  for a, b in zip(row[profile][x], row[profile][y], strict=True) if b is not None]  # fmt: skip
            ax.plot([a for a, _ in at], [b if y == "ess" else max(b, LEAST) for _, b in at],
                    label=row["name"], markersize=2.5, linewidth=0.9, **look)  # fmt: skip
        if x != "position":
            ax.set_xscale("log", base=2 if x == "length" else 10)
        ax.set_yscale("linear" if y == "ess" else "log")
        ax.set_ylabel(label)
        ax.set_xlabel(axis)
    handles, labels = axes[0][0].get_legend_handles_labels()
    below.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=6)
    below.suptitle(f"{last['folder']}: where the mismatch sits", fontsize=8)
    return figure


def _all(ax: Axes, records: Sequence[Record]) -> None:
    names = list(dict.fromkeys(row["name"] for record in records for row in record["formats"]))
    floor = [row["mismatch"]["kl_k3"] for record in records for row in record["formats"] if row["precision"] == FLOOR]
    ax.axhspan(max(min(floor), LEAST), max(*floor, LEAST), color=REFERENCE, alpha=0.25, label="floor: BF16")
    for number, (record, marker) in enumerate(zip(records, cycle(MARKERS), strict=False)):
        colour = COLOURS[number % len(COLOURS)] if len(records) > 1 else INK
        shift = 0.5 * ((number + 0.5) / len(records) - 0.5)
        for row in record["formats"]:
            at = names.index(row["name"]) + shift
            if row["k3_low"] is not None:
                ax.plot([at, at], [max(row["k3_low"], LEAST), max(row["k3_high"], LEAST)], color=colour, linewidth=1)
            ax.plot(at, max(row["mismatch"]["kl_k3"], LEAST), marker, color=colour, markersize=4)
        ax.plot([], [], marker, color=colour, label=record["folder"])
    ax.set_yscale("log")
    ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
    ax.set_ylabel("k3 a token, nats")
    ax.set_title(_title(records), fontsize=8)
    ax.legend(fontsize=6)
    if any(record["is_untrained"] for record in records):
        ax.text(0.99, 0.02, "untrained: costs only", transform=ax.transAxes, ha="right", fontsize=6, color=NOTE)


def _title(records: Sequence[Record]) -> str:
    """Range of k3 over all formats of the last probe, and its floor."""
    floor = max(row["mismatch"]["kl_k3"] for row in records[-1]["formats"] if row["precision"] == FLOOR)
    k3 = {row["name"]: row["mismatch"]["kl_k3"] for row in records[-1]["formats"] if row["precision"] != FLOOR}
    if not k3:
        return f"{records[-1]['folder']}: {FLOOR} alone"
    low, high = min(k3, key=lambda n: k3[n]), max(k3, key=lambda n: k3[n])
    span = f"k3 from {k3[low]:.2g} ({low}) to {k3[high]:.2g} ({high})" if len(k3) > 1 else f"k3 {k3[low]:.2g} ({low})"
    return f"{records[-1]['folder']}: {span}, the floor {floor:.2g}"


def _looks() -> Any:
    """Looks of formats, in order: colour and dash."""
    for dash in cycle(DASHES):
        for colour, marker in zip(COLOURS, cycle(MARKERS), strict=False):
            yield {"color": colour, "linestyle": dash, "marker": marker}
