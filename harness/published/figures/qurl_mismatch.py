"""Sampler and trainer drift apart while training (QuRL, arXiv 2602.13953): KL and the largest log ratio over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, geometric, ratio
from harness.published.figures.marks import METHODS, note
from harness.published.figures.records import Found, arm, in_panels, load, over_steps, series
from harness.records.arms import Arm, scored
from harness.records.folder import Series
from harness.report.plots.bands import over_steps as band_over_steps
from harness.report.plots.style import STYLE, draw_band, legend


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Arms of one precision of a sweep."""

    sweep: str
    precision: str
    n: int
    qurl: Mapping[str, Any] = field(default_factory=dict)
    """Config values of the arm of `qurl`."""


PANELS = {
    "int8, 8 digits, emulated": Panel(sweep="ablate_qurl", precision="int8", n=8, qurl={"knobs__UAQ__s": 1.5}),
    "int4, 8 digits, emulated": Panel(sweep="ablate_qurl", precision="int4", n=8, qurl={"knobs__UAQ__s": 1.5}),
    "int8, word problems, kernels": Panel(sweep="main_wordmath", precision="int8", n=10),
}
METHODS_SHOWN = ("bf16", "naive", "flashrl", "qurl_acr", "qurl")
FIRST, LAST = slice(0, 10), slice(-10, None)
"""The steps whose means are compared."""
KL, LARGEST = "mismatch/kl_k3", "mismatch/logp_absdiff_max"
REPORTED = 0.025 / 0.002
"""QuRL's KL(sampler || trainer) over 1000 steps; not reproduced."""


def shown(found: Found, panel: Panel) -> list[Arm]:
    """The arms of one panel that have scored runs; UAQ at the paper's scale, every other knob at its default."""
    chosen = [arm(found, "bf16", task__n=panel.n)]
    for method in METHODS_SHOWN[1:]:
        fields = panel.qurl if method == "qurl" else {}
        chosen.append(arm(found, method, panel.precision, parts=[], task__n=panel.n, **fields))
    return [arm for arm in chosen if arm is not None and scored(arm)]


def draw(results: Path) -> Drawn:
    """KL and largest log-prob difference over the steps, in the panels that have arms. Raises ValueError without
    results of the first panel's sweep."""
    panels = in_panels(results, PANELS, shown)
    rows: Series = {}
    for name, inside in panels.items():
        rows = {**rows, **series(load(results, PANELS[name].sweep), inside)}
    numbers = pd.DataFrame(
        {"panel": name, "method": arm.method, "seeds": len(arm.runs)}
        | geometric(over_steps(arm, rows, KL, FIRST)).cells("k3 first 10")
        | geometric(over_steps(arm, rows, KL, LAST)).cells("k3 last 10")
        | _growth(arm, rows).cells("growth")
        | geometric(over_steps(arm, rows, LARGEST, LAST)).cells("largest |d| last 10, nats")
        for name, inside in panels.items()
        for arm in inside
    )
    return Drawn(figure=_figure(panels, rows), numbers=numbers, says=_says(panels, rows))


def _figure(panels: dict[str, list[Arm]], rows: Series) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.4, 4.0), layout="constrained")
        axes: Any = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
        for column, (title, inside) in enumerate(panels.items()):
            for ax, name in zip(axes[:, column], (KL, LARGEST), strict=True):
                for arm in inside:
                    draw_band(ax, band_over_steps(arm, rows, name, "median", 5), METHODS[arm.method], is_log=True)
                ax.set_yscale("log")
                ax.minorticks_off()
            axes[0, column].set_title(title, fontsize=7.5)
            axes[1, column].set_xlabel("policy step")
        axes[0, 0].set_ylabel("k3, nats per token")
        axes[1, 0].set_ylabel("largest |log ratio|, nats")
        methods = [arm.method for inside in panels.values() for arm in inside]
        legend(figure, {name: METHODS[name] for name in methods}, marked=False)
        note(
            figure,
            "Median of seeds, all seeds as a band; running means of 5 steps. Digits: 0.2M parameters; words: 10M, "
            "vLLM's kernels.\nThe paper's curve has 1000 steps of a 7B model.",
        )
    return figure


def _says(panels: dict[str, list[Arm]], rows: Series) -> tuple[str, ...]:
    lines: list[str] = []
    for name, inside in panels.items():
        by_method = {arm.method: _growth(arm, rows) for arm in inside if arm.method != METHODS_SHOWN[0]}
        lines.append(
            f"{name}: from the first to the last ten steps the mismatch is multiplied by "
            + "; ".join(f"{estimate} ({method})" for method, estimate in by_method.items())
            + f". Reported over 1000 steps: {REPORTED:.1f}."
        )
    return tuple(lines)


def _growth(arm: Arm, rows: Series) -> Estimate:
    return ratio(over_steps(arm, rows, KL, LAST), over_steps(arm, rows, KL, FIRST))
