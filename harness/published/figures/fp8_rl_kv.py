"""FP8 KV cache, corrections and training in FP8 (FP8-RL, arXiv 2601.18150): mismatch and accuracy of each arm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, called, difference, floored, geometric, ratio
from harness.published.figures.marks import name_rows, note
from harness.published.figures.records import Found, arm, auc, in_panels, summary
from harness.records.arms import Arm, scored
from harness.report.plots.colours import BLUE, GREEN, INK, ORANGE
from harness.report.plots.style import STYLE, Look, legend

CONTROL = "bf16"
ROWS = (
    ("naive", "fp8_block", "FP8 weights, no correction"),
    ("naive", "fp8_block+kv8", "FP8 weights and KV, no correction"),
    ("fp8_rl", "fp8_block+kv8", "... KV recalibrated, TIS (fp8_rl)"),
    ("fp8_rl_mis", "fp8_block+kv8", "... KV recalibrated, MIS (fp8_rl_mis)"),
    ("fp8_rl_e2e", "fp8_block+kv8", "... and FP8 training (fp8_rl_e2e)"),
    ("jet_rl", "fp8_block", "one FP8 flow, BF16 KV (jet_rl)"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs of a sweep that are compared with one another."""

    sweep: str
    n: int
    look: Look


SETTINGS = {
    "8 digits, emulated": Setting(sweep="standard", n=8, look=Look(colour=INK, dash="", marker="o")),
    "16 digits, emulated": Setting(sweep="standard", n=16, look=Look(colour=BLUE, dash="", marker="s")),
    "word problems, 245 tokens, FP8 kernels": Setting(
        sweep="main_wordmath", n=10, look=Look(colour=ORANGE, dash="", marker="D")
    ),
    "word problems, 780 tokens, FP8 kernels": Setting(
        sweep="main_wordmath", n=30, look=Look(colour=GREEN, dash="", marker="^")
    ),
}
Table = dict[tuple[str, str], Estimate]
"""By the words of a row and of a setting."""


def shown(found: Found, setting: Setting) -> dict[str, Arm]:
    """CONTROL and the words of a row -> its arm; empty without a scored run of the control, and without a row."""
    control = arm(found, CONTROL, task__n=setting.n)
    if control is None or not scored(control):
        return {}
    rows = {words: arm(found, method, precision, task__n=setting.n) for method, precision, words in ROWS}
    there = {words: a for words, a in rows.items() if a is not None}
    return {CONTROL: control} | there if there else {}


def draw(results: Path) -> Drawn:
    """Median k3 and AUC against bf16 of every arm, in every setting that has arms. Raises ValueError without results
    of the first one's sweep."""
    inside = in_panels(results, SETTINGS, shown)
    controls = {name: arms[CONTROL] for name, arms in inside.items()}
    chosen = {(words, name): arms[words] for name, arms in inside.items() for words in arms if words != CONTROL}
    kls = {key: geometric(floored(summary(a, "k3_median"))) for key, a in chosen.items()}
    over = {
        key: ratio(floored(summary(a, "k3_median")), summary(controls[key[1]], "k3_median"))
        for key, a in chosen.items()
    }
    gaps = {key: difference(auc(a), auc(controls[key[1]])) for key, a in chosen.items()}
    numbers = pd.DataFrame(
        {"arm": words, "setting": name, "seeds": gaps[words, name].seeds}
        | kls[words, name].cells("median k3, nats")
        | over[words, name].cells("k3 over bf16")
        | gaps[words, name].cells("AUC - bf16")
        for words, name in chosen
    )
    return Drawn(figure=_figure(kls, gaps), numbers=numbers, says=_says(kls, gaps))


def _figure(kls: Table, gaps: Table) -> Figure:
    names = [words for *_, words in ROWS if any(key[0] == words for key in kls)]
    settings = [name for name in SETTINGS if any(key[1] == name for key in kls)]
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 3.6), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        left, right = axes
        for ax, table, zero in ((left, kls, None), (right, gaps, 0.0)):
            for index, setting in enumerate(settings):
                look, shift = SETTINGS[setting].look, 0.2 * (index - (len(settings) - 1) / 2)
                for y, name in enumerate(names):
                    if (name, setting) in table:
                        e = table[name, setting]
                        ax.plot([e.low, e.high], [y + shift] * 2, color=look.colour, linewidth=1.1, alpha=0.7)
                        ax.plot(e.value, y + shift, color=look.colour, marker=look.marker, linestyle="", markersize=4)
            name_rows(ax, names, zero)
        left.set(title="Mismatch", xlabel="median k3, nats per token", xscale="log")
        left.minorticks_off()
        right.set(title="Accuracy while training", xlabel="AUC minus that of bf16")
        legend(figure, {name: SETTINGS[name].look for name in settings}, marked=True)
        note(
            figure,
            "A cache of 9 to 33 tokens of digits leaves FP8 little to spoil; word problems have 430 and 1300, with "
            "their questions.\n95 % intervals over seeds, none of one seed; collapsed runs are counted. fp8_rl has no "
            "run on the base of 780 tokens\nwhere most runs collapse. k3 below 1e-6 is float32 noise, drawn at 1e-6.",
        )
    return figure


def _says(kls: Table, gaps: Table) -> tuple[str, ...]:
    lines: list[str] = []
    plain, kv, fixed = (words for *_, words in ROWS[:3])
    e2e = ROWS[4][2]
    for name in SETTINGS:
        if (plain, name) in gaps and (kv, name) in gaps and (fixed, name) in gaps:
            lines.append(
                f"{name}: FP8 weights alone change the AUC by {gaps[plain, name]} ({called(gaps[plain, name])}), with "
                f"an FP8 cache {gaps[kv, name]} ({called(gaps[kv, name])}), "
                f"and fp8_rl {gaps[fixed, name]} ({called(gaps[fixed, name])})."
            )
        if (e2e, name) in kls and (kv, name) in kls:
            order = "below" if kls[e2e, name].high < kls[kv, name].low else "not clearly below"
            lines.append(f"{name}: the mismatch with FP8 in the trainer too is {order} that of FP8 rollouts alone.")
    return tuple(lines)
