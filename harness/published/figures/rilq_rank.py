"""How much rank compensating adapters need (RILQ, arXiv 2412.01129): mismatch and accuracy by rank and start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, called, difference, floored, geometric, ratio
from harness.published.figures.marks import draw_points, note
from harness.published.figures.records import Found, arm, arms, auc, known, load, summary
from harness.records.arms import Arm
from harness.report.plots.colours import GREY_63, REFERENCE
from harness.report.plots.style import PRECISION_LOOKS, STYLE, legend

PRECISIONS = ("int3", "int2")
REPORTED = ((16, 10.23), (32, 10.01), (64, 10.05), (128, 10.12))
"""(rank, perplexity on WikiText-2) of LLaMA-2-7B at 2 bits, 433.65 without adapters; not reproduced."""
MEASURES = ("k3_median", "auc")
OTHERS = ("none", "loftq", "cloq", "rilq_init", "rilq_refresh")
Panel = dict[str, Arm]


def settings(found: Found, precision: str) -> Panel:
    """ "none", one entry per rank ("16"), other starts and the two other uses of the adapters."""
    ranked = sorted(
        arms(found, "rilq", precision, knobs__RILQ__start="rilq"), key=lambda a: a.fields["knobs.RILQ.rank"]
    )
    chosen: dict[str, Arm | None] = {"none": arm(found, "naive", precision)}
    chosen |= {str(a.fields["knobs.RILQ.rank"]): a for a in ranked}
    chosen |= {start: arm(found, "rilq", precision, knobs__RILQ__start=start) for start in ("loftq", "cloq")}
    chosen |= {method: arm(found, method, precision) for method in ("rilq_init", "rilq_refresh")}
    return {name: a for name, a in chosen.items() if a is not None}


def draw(results: Path) -> Drawn:
    """Median k3 and AUC against bf16, by rank; other starts and uses beside them."""
    found = load(results, "ablate_rilq")
    (control,) = known(found, arm(found, "bf16"))
    panels = {precision: settings(found, precision) for precision in PRECISIONS}
    known(found, *(a for inside in panels.values() for a in inside.values()))
    kls = {
        (p, name): geometric(floored(summary(a, "k3_median")))
        for p, inside in panels.items()
        for name, a in inside.items()
    }
    gaps = {(p, name): difference(auc(a), auc(control)) for p, inside in panels.items() for name, a in inside.items()}
    numbers = pd.DataFrame(
        {"precision": p, "rank or setting": name, "seeds": gap.seeds}
        | kls[p, name].cells("median k3, nats")
        | gap.cells("AUC - bf16")
        for (p, name), gap in gaps.items()
    )
    return Drawn(figure=_figure(kls, gaps), numbers=numbers, says=_says(panels))


def _figure(kls: dict[tuple[str, str], Estimate], gaps: dict[tuple[str, str], Estimate]) -> Figure:
    ranks = sorted({int(name) for _, name in gaps if name.isdigit()})
    others = [name for name in OTHERS if any(key[1] == name for key in gaps)]
    places = {str(rank): float(x) for x, rank in enumerate(ranks)}
    places |= {name: len(ranks) + 0.6 + x for x, name in enumerate(others)}
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 3.0), layout="constrained")
        axes: Any = figure.subplots(1, 2)
        for index, precision in enumerate(PRECISIONS):
            look, shift = PRECISION_LOOKS[precision], 0.12 * (2 * index - 1)
            for ax, table in zip(axes, (kls, gaps), strict=True):
                line = [str(rank) for rank in ranks if (precision, str(rank)) in table]
                draw_points(
                    ax, [places[name] for name in line], [table[precision, name] for name in line], look, shift=shift
                )
                for name in others:
                    if (precision, name) in table:
                        draw_points(ax, [places[name]], [table[precision, name]], look, shift=shift)
        for ax in axes:
            ax.set_xticks(list(places.values()), [name.replace("_", "\n") for name in places], fontsize=6.5)
            ax.axvline(len(ranks) - 0.2, color=GREY_63, linewidth=0.6)
            ax.set_xlabel("rank of the adapters | other settings", fontsize=7.5)
            ax.grid(axis="x", visible=False)
        axes[0].set(title="Mismatch", ylabel="median k3, nats per token", yscale="log")
        axes[0].minorticks_off()
        axes[1].set(title="Accuracy while training", ylabel="AUC minus that of bf16")
        axes[1].axhline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
        legend(figure, {precision: PRECISION_LOOKS[precision] for precision in PRECISIONS})
        note(
            figure,
            "Layers are 64 wide here, so rank 32 is half of everything; the paper's are 4096 wide. 95 % intervals.",
        )
    return figure


def _says(panels: dict[str, Panel]) -> tuple[str, ...]:
    lines: list[str] = []
    for precision, inside in panels.items():
        ranks = [name for name in inside if name.isdigit()]
        if len(ranks) > 1:
            low, high = inside[ranks[0]], inside[ranks[-1]]
            fewer = ratio(summary(low, "k3_median"), summary(high, "k3_median"))
            gap = difference(auc(high), auc(low))
            lines.append(
                f"{precision}: rank {ranks[0]} has {fewer} times the mismatch of rank {ranks[-1]}; the AUC of rank "
                f"{ranks[-1]} minus that of rank {ranks[0]} is {gap}: {called(gap)}."
            )
        if "none" in inside and ranks:
            gap = difference(auc(inside[ranks[-1]]), auc(inside["none"]))
            lines.append(f"{precision}: rank {ranks[-1]} against no adapters: {gap}: {called(gap)}.")
    low, high = min(REPORTED)[1], max(REPORTED)[1]
    lines.append(
        f"Reported at 2 bits: perplexity {low:.2f} at rank {min(REPORTED)[0]}, {high:.2f} at rank {max(REPORTED)[0]}."
    )
    return tuple(lines)
