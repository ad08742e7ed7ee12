"""Tokens that the policy clip stops, and that QuRL's ACR lets through (arXiv 2602.13953): clipped tokens over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import difference, fraction, ratio
from harness.published.figures.marks import METHODS, draw_rows, note
from harness.published.figures.qurl_mismatch import PANELS, shown
from harness.published.figures.records import auc, load, over_steps, series
from harness.records.arms import Arm
from harness.records.folder import Series
from harness.report.plots.bands import over_steps as band_over_steps
from harness.report.plots.style import STYLE, draw_band, legend

CLIPPED, HIGH = "train/clip_frac", "train/clip_high_frac"
HIGH_WORDS = "at the upper clip"


def draw(results: Path) -> Drawn:
    """Fraction of clipped tokens over the steps, and at the upper clip where the series has it."""
    found = load(results, "ablate_qurl")
    panels = {p.precision: shown(found, p) for p in PANELS.values() if p.sweep == found.sweep}
    rows = series(found, [arm for inside in panels.values() for arm in inside])
    control = next(arm for inside in panels.values() for arm in inside)
    numbers = pd.DataFrame(
        {"precision": precision, "method": arm.method, "seeds": len(arm.runs)}
        | fraction(over_steps(arm, rows, CLIPPED)).cells("clipped tokens")
        | fraction(over_steps(arm, rows, HIGH)).cells(HIGH_WORDS)
        | difference(auc(arm), auc(control)).cells("AUC - bf16")
        for precision, inside in panels.items()
        for arm in inside
    )
    return Drawn(figure=_figure(panels, rows), numbers=numbers, says=_says(panels, rows))


def _figure(panels: dict[str, list[Arm]], rows: Series) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 3.7), layout="constrained")
        axes: Any = figure.subplots(2, len(panels), height_ratios=(1.4, 1), sharey="row", sharex="row")
        has_high = any(over_steps(arm, rows, HIGH) for inside in panels.values() for arm in inside)
        column = HIGH if has_high else CLIPPED
        for index, (precision, inside) in enumerate(panels.items()):
            above, below = axes[:, index]
            for arm in inside:
                draw_band(above, band_over_steps(arm, rows, CLIPPED, "mean", 5), METHODS[arm.method])
            above.set_title(f"{precision} rollouts")
            above.set_xlabel("policy step (mean, and all seeds as a band)")
            draw_rows(
                below, [(a.method, fraction(over_steps(a, rows, column)), METHODS[a.method]) for a in inside], None
            )
            below.set_xlabel("fraction of tokens" + (f" {HIGH_WORDS}, A > 0" if has_high else " clipped"))
        axes[0, 0].set_ylabel("clipped tokens")
        axes[0, 0].set_ylim(bottom=0)
        axes[1, 0].set_xlim(left=0)
        methods = [arm.method for inside in panels.values() for arm in inside]
        legend(figure, {name: METHODS[name] for name in methods}, marked=False)
        note(
            figure,
            "Four updates per batch, so that ratios leave 1. Rows: mean over training, 95 % intervals over seeds.",
        )
    return figure


def _says(panels: dict[str, list[Arm]], rows: Series) -> tuple[str, ...]:
    lines: list[str] = []
    for precision, inside in panels.items():
        by_method = {arm.method: over_steps(arm, rows, HIGH) or over_steps(arm, rows, CLIPPED) for arm in inside}
        if {"qurl_acr", "flashrl"} <= set(by_method):
            less = ratio(by_method["qurl_acr"], by_method["flashrl"])
            what = "of the tokens at the upper clip" if over_steps(inside[0], rows, HIGH) else "of the clipped tokens"
            clear = "fewer" if less.high < 1 else "more" if less.low > 1 else "not clearly fewer or more"
            lines.append(f"{precision}: ACR has {less} times flashrl's share {what}: {clear}.")
    return tuple(lines)
