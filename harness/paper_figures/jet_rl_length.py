"""Gap to bf16 by response length (Jet-RL, arXiv 2601.14243): one FP8 flow against a BF16 trainer with FP8 rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.arms import Arm
from harness.panels import FAMILIAR, PRECISION_LOOKS, STYLE, Look
from harness.paper_figures.drawn import Drawn
from harness.paper_figures.estimates import Estimate, called, difference, floored, geometric
from harness.paper_figures.marks import METHODS, draw_points, legend_of, note
from harness.paper_figures.records import arm, auc, known, load, summary

GROUPS = {
    "FP8 rollouts": (("naive", "fp8_block"), ("jet_rl", "fp8_block")),
    "4-bit rollouts": (
        ("naive", "nvfp4"), ("flashrl", "nvfp4"), ("naive", "int4"), ("flashrl", "int4"), ("rilq", "int4"),
        ("qat_kd", "int4"),
    ),
}  # fmt: skip
HOLLOW = {"nvfp4": "#E69F00"}
Arms = dict[tuple[str, str], dict[int, Arm]]


def look(method: str, precision: str) -> Look:
    """The method's; without a correction the format's, for there the format is what differs."""
    if precision in HOLLOW:
        return Look(colour=HOLLOW[precision], dash=METHODS[method].dash, marker=METHODS[method].marker)
    return PRECISION_LOOKS[precision] if method in FAMILIAR and precision == "fp8_block" else METHODS[method]


def draw(results: Path) -> Drawn:
    """AUC minus that of bf16, and mismatch, by the number of elements to sort."""
    found = load(results, "length")
    lengths = sorted({int(a.fields["task.n"]) for a in found.arms})
    controls = {n: a for n in lengths if (a := arm(found, "bf16", task__n=n)) is not None}
    known(found, *controls.values())
    chosen: Arms = {}
    for pair in [pair for group in GROUPS.values() for pair in group]:
        inside = {n: a for n in controls if (a := arm(found, *pair, task__n=n)) is not None}
        chosen |= {pair: inside} if inside else {}
    gaps = {key: {n: difference(auc(a), auc(controls[n])) for n, a in of.items()} for key, of in chosen.items()}
    kls = {key: {n: geometric(floored(summary(a, "k3_median"))) for n, a in of.items()} for key, of in chosen.items()}
    numbers = pd.DataFrame(
        {"method": key[0], "precision": key[1], "n": n, "seeds": gap.seeds}
        | gap.cells("AUC - bf16")
        | kls[key][n].cells("median k3, nats")
        for key, of in gaps.items()
        for n, gap in of.items()
    )
    return Drawn(figure=_figure(gaps, kls), numbers=numbers, says=_says(gaps, kls))


def _figure(
    gaps: dict[tuple[str, str], dict[int, Estimate]], kls: dict[tuple[str, str], dict[int, Estimate]]
) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 4.2), layout="constrained")
        axes: Any = figure.subplots(2, 2, sharex=True, sharey="row")
        for column, (title, group) in enumerate(GROUPS.items()):
            inside = [key for key in group if key in gaps]
            for index, key in enumerate(inside):
                shift = 0.35 * (index - (len(inside) - 1) / 2)
                for ax, values in ((axes[0, column], gaps[key]), (axes[1, column], kls[key])):
                    draw_points(ax, list(values), list(values.values()), look(*key), shift)
            axes[0, column].set_title(title)
            axes[0, column].axhline(0.0, color="#707070", linewidth=0.8, zorder=1)
            axes[1, column].set_xlabel("digits to sort, n (a response has n + 1 tokens)")
            axes[1, column].set_yscale("log")
            axes[1, column].minorticks_off()
        lengths = sorted({n for of in gaps.values() for n in of})
        axes[0, 0].set_xticks(lengths, [str(n) for n in lengths])
        axes[0, 0].set_ylabel("AUC minus that of bf16")
        least = min(e.value for of in gaps.values() for e in of.values())
        axes[0, 0].set_ylim(least - 0.15, 0.2)  # intervals of few seeds may be longer than the page
        kl = [e.value for of in kls.values() for e in of.values()]
        axes[1, 0].set_ylim(min(kl) / 3, max(kl) * 5)
        legend_of(figure, [(" ".join(key), look(*key)) for key in gaps], columns=4)
        axes[1, 0].set_ylabel("median k3, nats per token")
        note(
            figure,
            "Responses of 9 to 33 tokens; the paper's gap opens at thousands. Bars: 95 % intervals over seeds.",
        )
    return figure


def _says(
    gaps: dict[tuple[str, str], dict[int, Estimate]], kls: dict[tuple[str, str], dict[int, Estimate]]
) -> tuple[str, ...]:
    lines: list[str] = []
    for key in GROUPS["FP8 rollouts"]:
        if key in gaps:
            first, last = min(gaps[key]), max(gaps[key])
            lines.append(
                f"{' '.join(key)}: {gaps[key][first]} at n = {first} ({called(gaps[key][first])}), "
                f"{gaps[key][last]} at n = {last} ({called(gaps[key][last])}); "
                f"median k3 {kls[key][first].value:.1e} and {kls[key][last].value:.1e} nats."
            )
    return tuple(lines)
