"""Reward of LoRA over a shared 4-bit base, with and without noise (QeRL, arXiv 2510.11696), against BF16 and NF4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import called, difference, fraction, mean
from harness.published.figures.marks import METHODS, draw_rows, note
from harness.published.figures.qerl_entropy import shown
from harness.published.figures.records import accuracy_at, auc, load, series, summary
from harness.records.arms import Arm
from harness.records.folder import Series
from harness.report.plots.bands import over_steps as band_over_steps
from harness.report.plots.style import STYLE, draw_band, legend

REWARD = "reward/mean"
FALLBACK = "reward/accuracy"
"""Column that packed sweeps always have; the same where a task shapes no reward."""
BASELINE = "bf16_lora"


def draw(results: Path) -> Drawn:
    """Reward curves of the sampler, and accuracy in the reference precision against BF16 LoRA."""
    found = load(results, "ablate_aqn")
    chosen = shown(found)
    rows = series(found, chosen)
    control = next((arm for arm in chosen if arm.method == BASELINE), chosen[0])
    numbers = pd.DataFrame(
        {"method": arm.method, "precision": arm.precision, "seeds": len(arm.runs)}
        | mean(summary(arm, "reward_last")).cells("reward last 5")
        | fraction(accuracy_at(arm, "reference", last=True)).cells("final accuracy")
        | fraction(auc(arm)).cells("AUC")
        | difference(auc(arm), auc(control)).cells(f"AUC - {control.method}")
        for arm in chosen
    )
    return Drawn(figure=_figure(chosen, rows, control), numbers=numbers, says=_says(chosen, control))


def _figure(chosen: list[Arm], rows: Series, control: Arm) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.8), layout="constrained")
        axes: Any = figure.subplots(1, 2, width_ratios=(1.3, 1))
        left, right = axes
        for arm in chosen:
            band = band_over_steps(arm, rows, REWARD, window=5)
            draw_band(
                left, band if len(band.x) else band_over_steps(arm, rows, FALLBACK, window=5), METHODS[arm.method]
            )
        left.set(title="Reward while training", xlabel="policy step (mean, and all seeds as a band)")
        left.set_ylabel("sampler reward, mean of 5 steps")
        others = [arm for arm in chosen if arm is not control]
        draw_rows(right, [(a.method, difference(auc(a), auc(control)), METHODS[a.method]) for a in others])
        right.set(title="Accuracy, reference precision", xlabel=f"AUC minus {control.method}")
        legend(figure, {arm.method: METHODS[arm.method] for arm in chosen}, columns=6, marked=False)
        note(
            figure,
            "The sampler's reward is not comparable across formats; accuracy in one reference precision is.\n"
            "bf16 trains all weights, the others LoRA adapters.",
        )
    return figure


def _says(chosen: list[Arm], control: Arm) -> tuple[str, ...]:
    scores = {arm.method: auc(arm) for arm in chosen}
    lines = []
    for name, other in (("qerl_no_aqn", control.method), ("qerl", "qerl_no_aqn"), ("qerl", "bf16")):
        if name in scores and other in scores and name != other:
            gap = difference(scores[name], scores[other])
            lines.append(f"AUC of {name} minus that of {other}: {gap}: {called(gap)}.")
    return tuple(lines)
