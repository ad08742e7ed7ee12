"""Rollout throughput of low-bit formats by model size (FlashRL's blog, OpenReview 8MHqvb4lK9).

Our speeds are those of emulated formats: they say nothing about hardware, and the figure says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, geometric, ratio
from harness.published.figures.marks import draw_points, note
from harness.published.figures.records import arm, known, load, value_of
from harness.records.arms import Arm
from harness.report.plots.colours import BLUE, REFERENCE
from harness.report.plots.style import PRECISION_LOOKS, STYLE, legend

PRECISIONS = ("int8", "fp8_block", "nvfp4", "int4")
SIZES = ("xs", "s", "m", "l")
REPORTED = ((7e9, 1.2, 1.3), (14e9, 1.3, 1.56), (32e9, 1.7, 1.9))
"""(parameters, lowest, highest) INT8 over BF16, by QuRL's authors on A100 and H100; not reproduced."""


def parameters(arm: Arm) -> float:
    """Weights of a decoder with a tied head, from its config; norms left out."""
    f: dict[str, Any] = {name.removeprefix("model."): value for name, value in arm.fields.items()}
    attention = f["hidden_size"] * f["head_dim"] * 2 * (f["num_heads"] + f["num_kv_heads"])
    layer = attention + 3 * f["hidden_size"] * f["intermediate_size"]
    return float(f["num_layers"] * layer + f["vocab_size"] * f["hidden_size"])


def draw(results: Path) -> Drawn:
    """Tokens per second and its ratio to bf16 by size, with what QuRL's authors report beside it."""
    found = load(results, "size")
    controls = known(found, *(arm(found, "bf16", model__name=size) for size in SIZES))
    speeds: dict[tuple[str, str], tuple[float, Estimate, Estimate]] = {}
    for control in controls:
        size = str(control.fields["model.name"])
        base = _speed(control)
        for precision in ("bf16", *PRECISIONS):
            other = control if precision == "bf16" else arm(found, "naive", precision, model__name=size)
            if other is not None and (speed := _speed(other)):
                speeds[precision, size] = parameters(control), geometric(speed), ratio(speed, base)
    numbers = pd.DataFrame(
        {"model": size, "parameters": int(count), "precision": precision, "seeds": speed.seeds}
        | speed.cells("tokens/s")
        | over.cells("over bf16")
        for (precision, size), (count, speed, over) in speeds.items()
    )
    return Drawn(figure=_figure(speeds), numbers=numbers, says=_says(speeds))


def _speed(arm: Arm) -> dict[tuple[int, int], float]:
    return value_of(arm, lambda run: run.tokens_per_s.get("rollout"))


def _figure(speeds: dict[tuple[str, str], tuple[float, Estimate, Estimate]]) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.7), layout="constrained")
        axes: Any = figure.subplots(1, 3, width_ratios=(1, 1, 0.75))
        absolute, relative, reported = axes
        shown = [precision for precision in ("bf16", *PRECISIONS) if any(key[0] == precision for key in speeds)]
        for precision in shown:
            rows = [row for (name, _), row in speeds.items() if name == precision]
            counts, look = [row[0] for row in rows], PRECISION_LOOKS[precision]
            draw_points(absolute, counts, [row[1] for row in rows], look)
            draw_points(relative, counts, [row[2] for row in rows], look)
        absolute.set(title="Ours, emulated", ylabel="rollout tokens/s", yscale="log")
        relative.set(title="Ours over bf16", ylabel="speed over bf16")
        for ax in (absolute, relative):
            ax.set_xscale("log")
            ax.set_xlabel("parameters")
            counts = {row[0]: f"{size}\n{row[0] / 1e6:.2g}M" for (_, size), row in speeds.items()}
            ax.set_xticks(list(counts), list(counts.values()))
            ax.minorticks_off()
        _reported(reported)
        tokens = [row[1].value for row in speeds.values()]
        absolute.set_ylim(min(tokens) / 2.5, max(tokens) * 2.5)  # an interval of two seeds may be longer than the page
        top = max(2.0, *(row[2].value for row in speeds.values()))
        for ax in (relative, reported):
            ax.set_ylim(0, top * 1.05)
            ax.axhline(1.0, color=REFERENCE, linewidth=0.8, zorder=1)
        legend(figure, {precision: PRECISION_LOOKS[precision] for precision in shown})
        note(
            figure,
            "Ours: every format, bf16 too, is emulated in torch, extra work on top of float32. The first two panels "
            "say nothing\nabout hardware. Reported: INT8 kernels on A100 and H100, QuRL's authors, not reproduced.",
        )
    return figure


def _reported(ax: Axes) -> None:
    for count, low, high in REPORTED:
        ax.plot([count, count], [low, high], color=BLUE, linewidth=4, alpha=0.55, solid_capstyle="butt")
    ax.set_xscale("log")
    ax.set_xlim(4e9, 6e10)
    ax.set_xticks([count for count, *_ in REPORTED], [f"{count / 1e9:.0f}B" for count, *_ in REPORTED])
    ax.minorticks_off()
    ax.set_title("Reported, INT8")
    ax.set_xlabel("parameters")


def _says(speeds: dict[tuple[str, str], tuple[float, Estimate, Estimate]]) -> tuple[str, ...]:
    ratios = {key: row[2] for key, row in speeds.items() if key[0] != "bf16"}
    slowest, fastest = min(ratios, key=lambda k: ratios[k].value), max(ratios, key=lambda k: ratios[k].value)
    lines = [
        f"Emulated low-bit rollouts run at {ratios[slowest].value:.2f} ({slowest[0]}, {slowest[1]}) to "
        f"{ratios[fastest].value:.2f} ({fastest[0]}, {fastest[1]}) times the speed of bf16: the cost of emulation."
    ]
    if speeds:
        for precision in ("int8", "int4"):
            sizes = [size for name, size in ratios if name == precision]
            if len(sizes) > 1:
                first, last = ratios[precision, sizes[0]], ratios[precision, sizes[-1]]
                word = (
                    "grows" if last.low > first.high else "falls" if last.high < first.low else "does not clearly move"
                )
                lines.append(
                    f"From {sizes[0]} to {sizes[-1]} the ratio of {precision} {word}: {first} to {last}. "
                    "Whether a kernel would pay is not in these numbers."
                )
    return tuple(lines)
