"""Where quantization-aware RL starts (Reasoning-QAT, arXiv 2601.14888): distilled or tuned, GPTQ or rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import called, difference, fraction
from harness.published.figures.marks import name_rows, note
from harness.published.figures.records import Found, accuracy_at, arm, auc, known, load
from harness.records.arms import Arm
from harness.report.plots.colours import BLUE, GREY_69, INK, REFERENCE, VERMILION
from harness.report.plots.style import STYLE, Look, legend

PRECISIONS = ("int4", "int3")
ROWS = (
    ("qat_kd", "GPTQ, distilled (qat_kd)"),
    ("qat_kd_sft", "GPTQ, fine-tuned (qat_kd_sft)"),
    ("qat_no_kd", "GPTQ alone (qat_no_kd)"),
    ("qat_rtn", "rounded (qat_rtn)"),
    ("qat_aligned", "rounded, scales follow (qat_aligned)"),
    ("flashrl", "no QAT, TIS (flashrl)"),
    ("naive", "no QAT (naive)"),
)
"""(method, words); the first two start from GPTQ and train before RL, the next two do not."""
PAIRS = (("qat_kd", "qat_kd_sft"), ("qat_kd", "qat_no_kd"), ("qat_no_kd", "qat_rtn"))
START = Look(colour=BLUE, dash="", marker="s")
END = Look(colour=VERMILION, dash="", marker="o")
GAP = Look(colour=INK, dash="", marker="o")


def draw(results: Path) -> Drawn:
    """Accuracy in the rollout's own format before and after RL, and AUC against bf16."""
    found = load(results, "ablate_qat")
    (control,) = known(found, arm(found, "bf16"))
    panels = {precision: inside for precision in PRECISIONS if (inside := _chosen(found, precision))}
    known(found, *(a for inside in panels.values() for a in inside.values()))
    numbers = pd.DataFrame(
        {"precision": precision, "method": method, "seeds": len(a.runs)}
        | fraction(accuracy_at(a, "rollout", last=False)).cells("start, rollout format")
        | fraction(accuracy_at(a, "rollout", last=True)).cells("end, rollout format")
        | fraction(accuracy_at(a, "reference", last=True)).cells("end, reference")
        | difference(auc(a), auc(control)).cells("AUC - bf16")
        for precision, inside in panels.items()
        for method, a in inside.items()
    )
    return Drawn(figure=_figure(panels, control), numbers=numbers, says=_says(panels))


def _chosen(found: Found, precision: str) -> dict[str, Arm]:
    chosen = {method: arm(found, method, precision) for method, _ in ROWS}
    return {method: a for method, a in chosen.items() if a is not None}


def _figure(panels: dict[str, dict[str, Arm]], control: Arm) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 1.5 * len(panels) + 0.8), layout="constrained")
        axes: Any = figure.subplots(len(panels), 2, sharex="col", sharey=True, squeeze=False)
        words = [(method, name) for method, name in ROWS if any(method in inside for inside in panels.values())]
        for line, (precision, inside) in zip(axes, panels.items(), strict=True):
            for y, (method, _) in enumerate(words):
                if method not in inside:
                    continue
                a = inside[method]
                ends = [fraction(accuracy_at(a, "rollout", last=last)) for last in (False, True)]
                line[0].annotate(
                    "", (ends[1].value, y), (ends[0].value, y), arrowprops={"arrowstyle": "-", "color": GREY_69}
                )
                gap = difference(auc(a), auc(control))
                for ax, e, look, shift in (
                    (line[0], ends[0], START, 0.12),
                    (line[0], ends[1], END, -0.12),
                    (line[1], gap, GAP, 0),
                ):
                    ax.plot([e.low, e.high], [y + shift] * 2, color=look.colour, linewidth=1.1, alpha=0.7)
                    ax.plot(e.value, y + shift, color=look.colour, marker=look.marker, markersize=4, linestyle="")
            line[0].set_title(f"{precision}, rollout format")
            line[1].set_title(f"{precision}, reference precision")
            line[1].axvline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
        for ax in axes.flat:
            name_rows(ax, [name for _, name in words], None)
        legend(figure, {"before RL": START, "after RL": END, "while training": GAP})
        axes[-1, 0].set_xlabel("accuracy in the run's own format")
        axes[-1, 1].set_xlabel("AUC minus that of bf16")
        note(
            figure, "The distillation's settings are ours (the paper's were not reachable). 95 % intervals over seeds."
        )
    return figure


def _says(panels: dict[str, dict[str, Arm]]) -> tuple[str, ...]:
    lines: list[str] = []
    for precision, inside in panels.items():
        parts = []
        for a, b in PAIRS:
            if a in inside and b in inside:
                gap = difference(auc(inside[a]), auc(inside[b]))
                start = difference(
                    accuracy_at(inside[a], "rollout", last=False), accuracy_at(inside[b], "rollout", last=False)
                )
                parts.append(f"{a} minus {b}: {gap} in AUC ({called(gap)}), {start} at the start")
        lines += [f"{precision}: " + "; ".join(parts) + "."] if parts else []
    return tuple(lines)
