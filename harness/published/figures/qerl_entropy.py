"""Does quantization noise keep the policy's entropy up (QeRL, arXiv 2510.11696)? Entropy over the steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import difference, mean
from harness.published.figures.marks import METHODS, draw_rows, note
from harness.published.figures.records import Found, arm, known, load, over_steps, series
from harness.records.arms import Arm
from harness.records.folder import Series
from harness.report.plots.bands import over_steps as band_over_steps
from harness.report.plots.style import STYLE, draw_band, legend

ENTROPY = "train/entropy"
EARLY = slice(0, 20)
"""Steps in which accuracies still differ little, so that entropy is not just how far training is."""
NOISELESS = "qerl_no_aqn"


def shown(found: Found) -> list[Arm]:
    """Full training and LoRA in BF16, NF4, the shared NVFP4 base without noise and with the paper's noise."""
    noisy = arm(found, "qerl", "nvfp4", knobs__AQN__sigma_start=0.01, knobs__AQN__decay="exponential")
    return known(
        found,
        *(arm(found, method) for method in ("bf16", "bf16_lora", "qlora")),
        arm(found, NOISELESS, "nvfp4"),
        noisy,
        arm(found, "aqn_bf16"),
    )


def draw(results: Path) -> Drawn:
    """Entropy curves, and each arm's early entropy against the noiseless base's."""
    found = load(results, "ablate_aqn")
    chosen = shown(found)
    rows = series(found, chosen)
    control = next((arm for arm in chosen if arm.method == NOISELESS), chosen[0])
    early = {arm.method: over_steps(arm, rows, ENTROPY, EARLY) for arm in chosen}
    numbers = pd.DataFrame(
        {"method": arm.method, "precision": arm.precision, "seeds": len(arm.runs)}
        | mean(early[arm.method]).cells("entropy first 20, nats")
        | mean(over_steps(arm, rows, ENTROPY, slice(-10, None))).cells("entropy last 10, nats")
        | difference(early[arm.method], early[control.method]).cells("first 20 - noiseless")
        for arm in chosen
    )
    return Drawn(figure=_figure(chosen, rows, early, control), numbers=numbers, says=_says(early, control))


def _figure(chosen: list[Arm], rows: Series, early: dict[str, Any], control: Arm) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.8), layout="constrained")
        axes: Any = figure.subplots(1, 2, width_ratios=(1.3, 1))
        left, right = axes
        for arm in chosen:
            draw_band(left, band_over_steps(arm, rows, ENTROPY, "mean", 5), METHODS[arm.method])
        left.set(title="Entropy while training", xlabel="policy step (mean, and all seeds as a band)")
        left.set_ylabel("token entropy of the trainer, nats")
        left.set_ylim(bottom=0)
        others = [arm for arm in chosen if arm is not control]
        draw_rows(
            right,
            [(arm.method, difference(early[arm.method], early[control.method]), METHODS[arm.method]) for arm in others],
        )
        right.set(title="First 20 steps", xlabel=f"nats minus {control.method}")
        legend(figure, {arm.method: METHODS[arm.method] for arm in chosen}, columns=6, marked=False)
        note(figure, "Entropy of the trainer, which has no noise itself; a less trained policy also has more of it.")
    return figure


def _says(early: dict[str, Any], control: Arm) -> tuple[str, ...]:
    lines: list[str] = []
    for name in ("qerl", "bf16_lora"):
        if name in early and name != control.method:
            gap = difference(early[name], early[control.method])
            word = "higher" if gap.low > 0 else "lower" if gap.high < 0 else "not clearly different"
            lines.append(
                f"Over the first 20 steps the entropy of {name} minus that of {control.method} is {gap} nats: {word}."
            )
    return tuple(lines)
