"""The figure of a capacity plan: seconds of a step by response length above, the memory of a GPU by size below; a
column per number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from harness.report.plots.colours import BLUE, GREEN, INK, ORANGE, PINK, SKY, VERMILION
from harness.report.plots.save import save_png
from harness.studies.capacity.memory import USABLE_GIB

if TYPE_CHECKING:
    from harness.studies.capacity.report import PlanRow

SHOWN = {"bf16": "-", "one FP8 flow": (0, (3, 1.5))}
"""Arm -> dash, above."""
LENGTH = 4096
"""Of the bars; the longest below it where it is not among the plan's."""
BARS = {
    "masters and moments": (BLUE, ("masters and moments",)),
    "engine": (SKY, ("engine weights", "engine overhead", "push")),
    "gradients, gathered weights": (ORANGE, ("gradients", "gathered or cast weights")),
    "activations": (GREEN, ("activations",)),
    "logits": (PINK, ("logits",)),
}
"""Word -> (colour, parts), from below."""
TOP = 1.45
"""Height of the lower panels, in limits; what is higher is cut, with its number on it."""


def draw(cells: Sequence[PlanRow], path: Path) -> list[Path]:
    """Cells that do not fit, or were not timed, have no seconds; their memory is drawn."""
    return save_png(lambda: _figure(cells), path)


def _figure(cells: Sequence[PlanRow]) -> Figure:
    gpus = list(dict.fromkeys(cell.place.gpus for cell in cells))
    sizes = list(dict.fromkeys(cell.work.size for cell in cells))
    lengths = sorted({cell.work.length for cell in cells})
    shown = max((n for n in lengths if n <= LENGTH), default=lengths[0])
    colours = dict(zip(sizes, _colours(len(sizes)), strict=True))
    figure = Figure(figsize=(max(4.8, 2.1 * len(gpus) + 0.6), 5.0), layout="constrained")
    axes: Any = figure.subplots(2, len(gpus), squeeze=False, sharey="row")
    for column, n in enumerate(gpus):
        own = [cell for cell in cells if cell.place.gpus == n]
        axes[0, column].set_title(f"{n} GPU{'s' if n > 1 else ''}, {'assumed' if n > 1 else 'estimated'}")
        for size in sizes:
            _seconds(axes[0, column], [c for c in own if c.work.size == size], colours[size])
        _length_scale(axes[0, column], lengths)
        _memory(axes[1, column], [c for c in own if c.work.arm == "bf16" and c.work.length == shown])
    axes[0, 0].set_ylabel("seconds of a step")
    axes[1, 0].set_ylabel("GiB of a GPU, BF16")
    _legend(figure, colours, shown)
    return figure


def _colours(count: int) -> list[Any]:
    return [mpl.colormaps["viridis"](0.92 * (1 - i / max(1, count - 1))) for i in range(count)]


def _seconds(ax: Axes, cells: Sequence[PlanRow], colour: Any) -> None:
    for arm, dash in SHOWN.items():
        known = sorted((c.work.length, c.step.total, c.step.is_host_bound)
                       for c in cells if c.work.arm == arm and c.step is not None)  # fmt: skip
        ax.plot([k[0] for k in known], [k[1] for k in known], color=colour, linestyle=dash)
        for length, seconds, is_host_bound in known if arm == "bf16" else ():
            face = "white" if is_host_bound else colour
            ax.plot([length], [seconds], "o", color=colour, markerfacecolor=face, clip_on=False)


def _memory(ax: Axes, cells: Sequence[PlanRow]) -> None:
    """Two bars per size: sampling, then the update."""
    for i, cell in enumerate(cells):
        for x, parts in ((i - 0.2, cell.place.sampling), (i + 0.2, cell.place.update)):
            below = 0.0
            for colour, names in BARS.values():
                height = sum(parts.get(name, 0.0) for name in names)
                ax.bar(x, height, 0.36, bottom=below, color=colour, linewidth=0)
                below += height
            if below > TOP * USABLE_GIB:
                ax.text(x, 0.96 * TOP * USABLE_GIB, f"{below:.0f}", rotation=90, ha="center", va="top", fontsize=6.5,
                        color=INK, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # fmt: skip
    ax.axhline(USABLE_GIB, color=VERMILION, linewidth=1.0)
    ax.set_ylim(0, TOP * USABLE_GIB)
    ax.set_xticks(range(len(cells)), labels=[cell.work.size for cell in cells])
    ax.grid(visible=False, axis="x")


def _length_scale(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_xticks(lengths, labels=[f"{n / 1024:g}k" if n >= 1024 else str(n) for n in lengths])
    ax.set_xlabel("response, tokens")


def _legend(figure: Figure, colours: dict[str, Any], shown: int) -> None:
    above = [Line2D([], [], color=colour, label=size) for size, colour in colours.items()]
    above += [
        Line2D([], [], color=INK, marker="o", label="BF16"),
        Line2D([], [], color=INK, marker="o", markerfacecolor="white", label="waits for the host"),
        Line2D([], [], color=INK, linestyle=SHOWN["one FP8 flow"], label="one FP8 flow"),
    ]
    figure.legend(handles=above, loc="outside upper center", ncols=5)
    below: list[Any] = [Patch(color=colour, label=words) for words, (colour, _) in BARS.items()]
    below.append(
        Line2D([], [], color=VERMILION, label=f"limit (bars at {shown} tokens: sampling without cache, update)")
    )
    figure.legend(handles=below, loc="outside lower center", ncols=2)
