"""Figures of the throughput map: ratios to BF16 by batch and context, where formats cross it, tokens/s by length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.report.plots.colours import BLUE, GREEN, GREY, GREY_63, GREY_85, INK, ORANGE, PINK, SKY, VERMILION, VIOLET
from harness.report.plots.save import save
from harness.report.plots.style import STYLE, Look
from harness.studies.throughput.cost import (
    baseline_of,
    decode_ratios,
    decode_tokens_per_s,
    falls_below,
    generation_tokens_per_s,
    ratio,
    reached,
)
from harness.studies.throughput.map_cells import MapCell, Records
from harness.studies.throughput.plan import BASELINE, Sweep
from harness.studies.throughput.settled import SPREAD, disturbed_cells
from harness.studies.throughput.tables import measured_specs, shown_batch, shown_length
from harness.studies.throughput.waiting import host_bound_cells

LOOKS = {
    "bf16": Look(colour=INK, dash="-", marker="o"),
    "fp16": Look(colour=GREY, dash=(0, (1.2, 1.2)), marker="P"),
    "int8": Look(colour=BLUE, dash="-", marker="s"),
    "fp8_block": Look(colour=SKY, dash="-", marker="D"),
    "fp8_block+kv8": Look(colour=GREEN, dash=(0, (5, 1.2, 1.2, 1.2)), marker="^"),
    "fp8_channel": Look(colour=PINK, dash=(0, (8, 1.5)), marker="<"),
    "fp8_tensor": Look(colour=PINK, dash=(0, (1.2, 1.2)), marker=">"),
    "w8a16": Look(colour=VIOLET, dash=(0, (3, 1, 1, 1)), marker="p"),
    "nvfp4": Look(colour=ORANGE, dash=(0, (5, 1.5)), marker="v"),
    "int4": Look(colour=VERMILION, dash=(0, (5, 1.5)), marker="X"),
}
OTHER = Look(colour=GREY_63, dash="-", marker="h")

Draw = Callable[[Sweep, Records], Figure]


def draw_all(sweep: Sweep, records: Records, folder: Path, more: Mapping[str, Draw] | None = None) -> list[Path]:
    """Write map.png, crossing.png, length.png and a figure for every name of `more`: their paths."""
    draws: dict[str, Draw] = {"map": draw_map, "crossing": draw_crossing, "length": draw_length, **(more or {})}
    with mpl.rc_context({"hatch.linewidth": 0.4}, fname=STYLE):
        return [save(draw(sweep, records), folder / f"{name}.png") for name, draw in draws.items()]


def compared_sizes(sweep: Sweep, records: Records) -> list[str]:
    """By size, those with a measured cell in another format than BF16; those with any, where that is all there is."""
    specs = measured_specs(sweep, records)
    others = [spec.size for spec in specs if spec.precision != BASELINE]
    return list(dict.fromkeys(others or [spec.size for spec in specs]))


def ratio_grid(sweep: Sweep, records: Records, size: str, precision: str) -> np.ndarray[Any, Any]:
    """[lengths, batches] ratios of decode rates to BF16, NaN where one of the two is missing."""
    record, base = records.get(f"{size}-{precision}", {}), baseline_of(records, size)
    rows = [
        [ratio(decode_tokens_per_s(record, b, n), decode_tokens_per_s(base, b, n)) for b in sweep.batches]
        for n in sweep.lengths
    ]
    return np.array([[np.nan if value is None else value for value in row] for row in rows])


def marked_cells(records: Records, size: str, precision: str) -> set[MapCell]:
    """(batch, length) where the format's cell or BF16's was disturbed, or waits for the host."""
    both = records.get(f"{size}-{precision}", {}), baseline_of(records, size)
    return set[MapCell]().union(*(kind(record) for record in both for kind in (disturbed_cells, host_bound_cells)))


def draw_map(sweep: Sweep, records: Records) -> Figure:
    """A heat map of batch by context for every size and precision."""
    sizes = compared_sizes(sweep, records)
    precisions = [name for name in sweep.precisions if name != BASELINE] or [BASELINE]
    figure = Figure(figsize=(6.75, 0.55 + 0.92 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(precisions), squeeze=False)
    norm, image, num_marked = TwoSlopeNorm(vcenter=1.0, vmin=0.5, vmax=2.0), None, 0
    colours = mpl.colormaps["RdBu"].with_extremes(bad=GREY_85)
    clear: dict[str, Any] = {}
    for row, size in enumerate(sizes):
        for column, precision in enumerate(precisions):
            ax = axes[row, column]
            ratios = np.ma.masked_invalid(ratio_grid(sweep, records, size, precision))
            marked = _as_mask(sweep, marked_cells(records, size, precision)) & ~np.ma.getmaskarray(ratios)
            clear.setdefault(precision, []).append(np.ma.masked_where(marked, ratios))
            image = ax.imshow(
                clear[precision][-1], norm=norm, cmap=colours, aspect="auto", origin="lower", interpolation="nearest"
            )
            ax.grid(visible=False)
            _write_ratios(ax, ratios, marked)
            num_marked += int(marked.sum())
            ax.set_xticks(range(len(sweep.batches)), [str(b) for b in sweep.batches] if row == len(sizes) - 1 else [])
            ax.set_yticks(range(len(sweep.lengths)), [_short(n) for n in sweep.lengths] if column == 0 else [])
            ax.tick_params(labelsize=4.5, length=1.5)
            ax.tick_params(axis="x", rotation=90)
            if row == 0:
                ax.set_title(precision.replace("+", "\n+"), fontsize=6)
            if column == 0:
                ax.set_ylabel(size.upper(), fontweight="bold")
    assert image is not None
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, ticks=[0.5, 0.75, 1.0, 1.5, 2.0])
    bar.set_label("decode rate over BF16 (grey: not measured)", fontsize=6.5)
    bar.ax.tick_params(labelsize=6)
    figure.suptitle(_finding(sweep, clear), fontsize=8.5, fontweight="bold", x=0.01, ha="left")
    words = (
        f"\nwhite and hatched, no ratio of formats: waits for the host, or disturbed (p90/p10 above {SPREAD:g}, or "
        "above its neighbours' line)"
    )
    figure.supxlabel("batch (context in tokens on the left)" + (words if num_marked else ""), fontsize=7)
    return figure


def _finding(sweep: Sweep, clear: Mapping[str, Sequence[Any]]) -> str:
    """The fastest format, by the median of its clear cells, at the smallest and at the largest batch, where they have
    some."""
    said: list[str] = []
    for column in (0, len(sweep.batches) - 1):
        found = {name: np.ma.concatenate([grid[:, column] for grid in grids]).compressed()
                 for name, grids in clear.items()}  # fmt: skip
        medians = {name: float(np.median(values)) for name, values in found.items() if len(values)}
        if medians:
            best = max(medians, key=lambda name: medians[name])
            words = f"{best} decodes fastest ({medians[best]:.1f} x BF16)"
            if medians[best] < 1:
                words = f"no format decodes faster than BF16 (at most {medians[best]:.2f} x, {best})"
            said.append(f"at batch {sweep.batches[column]} {words}")
    text = ",\n".join(dict.fromkeys(said))
    return text[:1].upper() + text[1:]


def _as_mask(sweep: Sweep, cells: set[MapCell]) -> np.ndarray[Any, Any]:
    """[lengths, batches] bool: the cells that are in the set."""
    return np.array([[(batch, length) in cells for batch in sweep.batches] for length in sweep.lengths])


def _write_ratios(ax: Axes, ratios: Any, marked: np.ndarray[Any, Any]) -> None:
    """The ratio in every cell, small; marked cells are white and hatched, with their ratio in grey."""
    for (row, column), value in np.ndenumerate(ratios):
        if np.ma.is_masked(value) or not np.isfinite(value):
            continue
        colour = "white" if value > 1.75 or value < 0.62 else INK
        if marked[row, column]:
            colour, corner = GREY, (column - 0.5, row - 0.5)
            ax.add_patch(Rectangle(corner, 1, 1, facecolor="white", hatch="/////", linewidth=0, edgecolor=GREY_85))
        ax.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=3.6, color=colour)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _panels(sizes: Sequence[str]) -> tuple[Figure, list[Axes]]:
    columns = min(3, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = Figure(figsize=(6.75, 0.5 + 1.75 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    axes = list(grid.flat)
    for ax in axes[len(sizes) :]:
        ax.set_visible(False)
    for ax, size in zip(axes, sizes, strict=False):
        ax.set_title(size.upper())
    return figure, axes[: len(sizes)]


def _style(precision: str) -> dict[str, Any]:
    look = LOOKS.get(precision, OTHER)
    return {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "label": precision}


def _draw_line(ax: Axes, found: Sequence[tuple[int, float]], precision: str, marked: Collection[int]) -> None:
    """A line with its markers, white inside where a point was disturbed or waits for the host."""
    style = _style(precision)
    ax.plot([x for x, _ in found], [y for _, y in found], **style)
    hollow = [(x, y) for x, y in found if x in marked]
    if hollow:
        ax.plot([x for x, _ in hollow], [y for _, y in hollow], linestyle="none", marker=style["marker"],
                color=style["color"], markerfacecolor="white", zorder=3)  # fmt: skip


def _has_hollow(axes: Sequence[Axes]) -> bool:
    return any(line.get_markerfacecolor() == "white" for ax in axes for line in ax.lines)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {
        label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if _has_hollow(axes):
        name = "disturbed, or waits for the host"
        handles[name] = Line2D([], [], linestyle="none", marker="o", color=INK, markerfacecolor="white", label=name)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, max(1, len(handles))))


def draw_crossing(sweep: Sweep, records: Records) -> Figure:
    """Ratio to BF16 against the batch, a panel per size, the batch marked at which a format falls below."""
    sizes, length = compared_sizes(sweep, records), shown_length(sweep)
    figure, axes = _panels(sizes)
    for ax, size in zip(axes, sizes, strict=True):
        ax.axhline(1.0, color=INK, linewidth=0.8)
        level = 0
        for precision in sweep.precisions:
            record = records.get(f"{size}-{precision}", {})
            found = decode_ratios(record, baseline_of(records, size), sweep.batches, length)
            if precision == BASELINE or not found:
                continue
            marked = marked_cells(records, size, precision)
            hollow = {batch for batch, context in marked if context == length}
            _draw_line(ax, found, precision, hollow)
            at = falls_below(found)
            if at is not None and at > found[0][0]:
                style = _style(precision)
                ax.plot([at], [1.0], marker="|", markersize=9, markeredgewidth=1.4, color=style["color"])
                text = "~" * bool(hollow & {b for b, _ in found}) + f"{at:.0f}"
                ax.annotate(text, (at, 1.0), xytext=(0, -8 - 7 * (level % 2)), textcoords="offset points",
                            ha="center", va="top", fontsize=6, color=style["color"])  # fmt: skip
                level += 1
        batch_axis(ax, sweep.batches)
        ax.margins(y=0.14)  # room for the numbers of crossings
    _label(axes, "batch", f"decode rate over BF16\nat a context of {length}")
    _legend(figure, axes)
    return figure


def batch_axis(ax: Axes, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each of the values."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(values)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(round(value))))


def _label(axes: Sequence[Axes], x: str, y: str) -> None:
    for ax in axes:
        place = ax.get_subplotspec()
        if place is not None and place.is_first_col():
            ax.set_ylabel(y, fontsize=7)
        ax.set_xlabel(x)
        ax.tick_params(labelbottom=True)


def draw_length(sweep: Sweep, records: Records) -> Figure:
    """Tokens/s of a whole generation against its length, at one batch, a panel per size."""
    sizes, batch = compared_sizes(sweep, records), shown_batch(sweep)
    figure, axes = _panels(sizes)
    for ax, size in zip(axes, sizes, strict=True):
        for precision in sweep.precisions:
            record = records.get(f"{size}-{precision}", {})
            rates = [(n, generation_tokens_per_s(record, batch, sweep.prompt, n)) for n in sweep.lengths]
            found = [(n, rate / 1e3) for n, rate in rates if rate is not None]
            if found:
                unclear = disturbed_cells(record) | host_bound_cells(record)
                marked = [at for own, at in unclear if own == batch]
                hollow = {n for n, _ in found if any(at <= reached(sweep, n) for at in marked)}
                _draw_line(ax, found, precision, hollow)
        batch_axis(ax, sweep.lengths)
        ax.set_ylim(bottom=0)
    _label(axes, "length of the generation, tokens", f"thousand tokens/s\nat batch {batch}")
    _legend(figure, axes)
    return figure
