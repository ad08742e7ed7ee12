"""Do updates reach the codes? UAQ (QuRL, arXiv 2602.13953) against its own learning rate: code flips by its scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import called, difference, geometric, ratio
from harness.published.figures.marks import draw_points, note
from harness.published.figures.records import Found, arm, arms, auc, known, load, over_steps, series
from harness.records.arms import Arm
from harness.records.folder import Series
from harness.records.run_result import Pair
from harness.report.plots.colours import GREY_25, GREY_63, NOTE, REFERENCE
from harness.report.plots.style import PRECISION_LOOKS, STYLE, Look, legend

PRECISIONS = ("int8", "int4")
FLIPS = "sync/code_flip_rate"
AFTER_FIRST = slice(1, None)
"""The first push has no push before it."""
LR_SCALE = 1.5


def settings(found: Found, precision: str) -> dict[str, tuple[float, Arm]]:
    """Name -> (scale, arm): no scaling (ACR alone), UAQ at every scale, and the control that scales learning rates."""
    scaled = sorted(arms(found, "qurl", precision, parts=[]), key=lambda a: a.fields["knobs.UAQ.s"])
    chosen = {"none": (1.0, arm(found, "qurl_acr", precision, knobs__ACR__cap=2.0, knobs__ACR__u_max=None))}
    chosen |= {f"UAQ {a.fields['knobs.UAQ.s']:g}": (float(a.fields["knobs.UAQ.s"]), a) for a in scaled}
    chosen["lr"] = (LR_SCALE, arm(found, "qurl_lr", precision))
    return {name: (scale, a) for name, (scale, a) in chosen.items() if a is not None}


def draw(results: Path) -> Drawn:
    """Code flips per push over those without scaling, and accuracy against them, by UAQ's scale."""
    found = load(results, "ablate_qurl")
    panels = {precision: settings(found, precision) for precision in PRECISIONS}
    panels = {precision: inside for precision, inside in panels.items() if "none" in inside}
    known(found, *(a for inside in panels.values() for _, a in inside.values()))
    rows = series(found, [a for inside in panels.values() for _, a in inside.values()])
    numbers = pd.DataFrame(
        {"precision": precision, "setting": name, "scale": scale, "seeds": len(a.runs)}
        | geometric(_flips(a, rows)).cells("codes flipped per push")
        | ratio(_flips(a, rows), _flips(inside["none"][1], rows)).cells("over none")
        | difference(auc(a), auc(inside["none"][1])).cells("AUC - none")
        for precision, inside in panels.items()
        for name, (scale, a) in inside.items()
    )
    return Drawn(figure=_figure(panels, rows), numbers=numbers, says=_says(panels, rows))


def scaled_share(arm: Arm) -> float:
    """Part of a layer's quantized weights that UAQ divides: q, k, v, gate and up, not o and down."""
    f: dict[str, Any] = {name.removeprefix("model."): value for name, value in arm.fields.items()}
    width, heads = f["hidden_size"], f["head_dim"] * f["num_heads"]
    readers = width * (heads + 2 * f["head_dim"] * f["num_kv_heads"] + 2 * f["intermediate_size"])
    return readers / (readers + width * (heads + f["intermediate_size"]))


def _flips(arm: Arm, rows: Series) -> dict[Pair, float]:
    return over_steps(arm, rows, FLIPS, AFTER_FIRST)


def _figure(panels: dict[str, dict[str, tuple[float, Arm]]], rows: Series) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.7), layout="constrained")
        axes: Any = figure.subplots(1, 2)
        left, right = axes
        share = scaled_share(next(iter(panels.values()))["none"][1])
        _expected(left, share)
        for index, (precision, inside) in enumerate(panels.items()):
            look, shift = PRECISION_LOOKS[precision], 0.012 * (2 * index - 1)
            none = inside["none"][1]
            flips = {name: ratio(_flips(a, rows), _flips(none, rows)) for name, (_, a) in inside.items()}
            scores = {name: difference(auc(a), auc(none)) for name, (_, a) in inside.items()}
            for ax, values in ((left, flips), (right, scores)):
                line = [name for name in inside if name != "lr"]
                draw_points(ax, [inside[n][0] for n in line], [values[n] for n in line], look, shift=shift)
                if "lr" in inside:
                    _control(ax, LR_SCALE + 0.06 + shift, values["lr"], look)
        left.set(title="Codes that flip per push", xlabel="UAQ scale s", ylabel="flips over those without UAQ")
        right.set(title="Accuracy during training", xlabel="UAQ scale s", ylabel="AUC minus that without UAQ")
        right.axhline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
        control = Look(colour=GREY_25, dash="", marker="*")
        legend(figure, {p: PRECISION_LOOKS[p] for p in panels} | {"learning rates x 1.5, no UAQ": control})
        note(
            figure,
            f"UAQ scales {share:.0%} of the codes, those that read a norm. Bars: 95 % intervals over paired seeds. "
            "Learning rates\nat which a 0.2M model learns flip codes anyway.",
        )
    return figure


def _expected(ax: Axes, share: float) -> None:
    """Draw what flips would gain if the step of scaled codes grew by s (Adam) or s^2 (SGD) and flips with it."""
    scales = np.linspace(1.0, 2.0, 21)
    for power, style, words in ((1, "-", "s where scaled (Adam)"), (2, ":", "s² where scaled (SGD)")):
        expected = 1 + share * (scales**power - 1)
        ax.plot(scales, expected, color=GREY_63, linewidth=0.8, linestyle=style)
        ax.text(1.62, expected[13] + 0.04, words, fontsize=6.5, color=NOTE, ha="right", va="bottom")


def _control(ax: Axes, x: float, estimate: Any, look: Look) -> None:
    ax.plot([x, x], [estimate.low, estimate.high], color=look.colour, linewidth=0.9, alpha=0.6, solid_capstyle="butt")
    ax.plot(x, estimate.value, marker="*", color=look.colour, markersize=6, linestyle="")


def _says(panels: dict[str, dict[str, tuple[float, Arm]]], rows: Series) -> tuple[str, ...]:
    lines: list[str] = []
    for precision, inside in panels.items():
        none = inside["none"][1]
        for name in ("UAQ 1.5", "lr"):
            if name in inside:
                flips = ratio(_flips(inside[name][1], rows), _flips(none, rows))
                score = difference(auc(inside[name][1]), auc(none))
                what = "UAQ at 1.5" if name != "lr" else "its learning-rate control"
                lines.append(
                    f"{precision}: {what} flips {flips} times the codes of no scaling; its AUC differs by {score}: "
                    f"{called(score)}."
                )
    return tuple(lines)
