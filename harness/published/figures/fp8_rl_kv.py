"""FP8 KV cache, corrections and training in FP8 (FP8-RL, arXiv 2601.18150): mismatch and accuracy of each arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, called, difference, floored, geometric, ratio
from harness.published.figures.marks import name_rows, note
from harness.published.figures.records import Found, arm, auc, known, load, summary
from harness.records.arms import Arm
from harness.report.plots.colours import BLUE, INK
from harness.report.plots.style import STYLE, Look

ROWS = (
    ("naive", "fp8_block", "FP8 weights, no correction"),
    ("naive", "fp8_block+kv8", "FP8 weights and KV, no correction"),
    ("fp8_rl", "fp8_block+kv8", "... KV recalibrated, TIS (fp8_rl)"),
    ("fp8_rl_mis", "fp8_block+kv8", "... KV recalibrated, MIS (fp8_rl_mis)"),
    ("fp8_rl_e2e", "fp8_block+kv8", "... and FP8 training (fp8_rl_e2e)"),
    ("jet_rl", "fp8_block", "one FP8 flow, BF16 KV (jet_rl)"),
)
LENGTHS = {8: Look(colour=INK, dash="", marker="o"), 16: Look(colour=BLUE, dash="", marker="s")}
Table = dict[tuple[str, int], Estimate]


def draw(results: Path) -> Drawn:
    """Median k3 and AUC against bf16 of every arm, at two lengths."""
    found = load(results, "standard")
    controls = {n: a for n in LENGTHS if (a := arm(found, "bf16", task__n=n)) is not None}
    known(found, *controls.values())
    chosen = _chosen(found, controls)
    kls = {key: geometric(floored(summary(a, "k3_median"))) for key, a in chosen.items()}
    over = {
        key: ratio(floored(summary(a, "k3_median")), summary(controls[key[1]], "k3_median"))
        for key, a in chosen.items()
    }
    gaps = {key: difference(auc(a), auc(controls[key[1]])) for key, a in chosen.items()}
    numbers = pd.DataFrame(
        {"arm": words, "n": n, "seeds": gaps[words, n].seeds}
        | kls[words, n].cells("median k3, nats")
        | over[words, n].cells("k3 over bf16")
        | gaps[words, n].cells("AUC - bf16")
        for words, n in chosen
    )
    return Drawn(figure=_figure(kls, gaps), numbers=numbers, says=_says(kls, gaps))


def _chosen(found: Found, controls: dict[int, Arm]) -> dict[tuple[str, int], Arm]:
    return {
        (words, n): a
        for method, precision, words in ROWS
        for n in controls
        if (a := arm(found, method, precision, task__n=n)) is not None
    }


def _figure(kls: Table, gaps: Table) -> Figure:
    names = [words for *_, words in ROWS if any(key[0] == words for key in kls)]
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.9), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        left, right = axes
        for ax, table, zero in ((left, kls, None), (right, gaps, 0.0)):
            for n, look in LENGTHS.items():
                shift = -0.14 if n == min(LENGTHS) else 0.14
                for y, name in enumerate(names):
                    if (name, n) in table:
                        e = table[name, n]
                        ax.plot([e.low, e.high], [y + shift] * 2, color=look.colour, linewidth=1.1, alpha=0.7)
                        ax.plot(e.value, y + shift, color=look.colour, marker=look.marker, linestyle="", markersize=4,
                                label=f"n = {n}" if y == 0 and zero is None else "")  # fmt: skip
            name_rows(ax, names, zero)
        left.set(title="Mismatch", xlabel="median k3, nats per token", xscale="log")
        left.minorticks_off()
        right.set(title="Accuracy while training", xlabel="AUC minus that of bf16")
        figure.legend(loc="outside upper center", ncols=2)
        note(
            figure,
            "Emulated FP8; a cache of 9 to 33 tokens leaves FP8 little to spoil. 95 % intervals over seeds.\n"
            "k3 below 1e-6 is float32 noise, drawn at 1e-6.",
        )
    return figure


def _says(kls: Table, gaps: Table) -> tuple[str, ...]:
    lines: list[str] = []
    plain, kv, fixed = (words for *_, words in ROWS[:3])
    e2e = ROWS[4][2]
    for n in LENGTHS:
        if (plain, n) in gaps and (kv, n) in gaps and (fixed, n) in gaps:
            lines.append(
                f"n = {n}: FP8 weights alone change the AUC by {gaps[plain, n]} ({called(gaps[plain, n])}), with an "
                f"FP8 cache {gaps[kv, n]} ({called(gaps[kv, n])}), "
                f"and fp8_rl {gaps[fixed, n]} ({called(gaps[fixed, n])})."
            )
        if (e2e, n) in kls and (kv, n) in kls:
            order = "below" if kls[e2e, n].high < kls[kv, n].low else "not clearly below"
            lines.append(f"n = {n}: the mismatch with FP8 in the trainer too is {order} that of FP8 rollouts alone.")
    return tuple(lines)
