"""Gap to bf16 by response length (Jet-RL, arXiv 2601.14243): one FP8 flow against a BF16 trainer with FP8 rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, called, difference, floored, geometric
from harness.published.figures.marks import METHODS, draw_points, note
from harness.published.figures.records import Found, arm, auc, in_panels, summary
from harness.records.arms import scored
from harness.report.plots.colours import ORANGE, REFERENCE
from harness.report.plots.style import PRECISION_LOOKS, STYLE, Look, legend

Pair = tuple[str, str]
"""(method, precision)."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Some arms of a sweep."""

    sweep: str
    pairs: tuple[Pair, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    """Config values of the runs."""


PANELS = {
    "FP8, emulated": Panel(sweep="length", pairs=(("naive", "fp8_block"), ("jet_rl", "fp8_block"))),
    "4 bits, emulated": Panel(
        sweep="length",
        pairs=(("naive", "nvfp4"), ("flashrl", "nvfp4"), ("naive", "int4"), ("flashrl", "int4"), ("rilq", "int4"),
               ("qat_kd", "int4")),
    ),
    "FP8 kernels, H200": Panel(
        sweep="main_h200",
        pairs=(("naive", "fp8_block"), ("flashrl", "fp8_block"), ("jet_rl", "fp8_block")),
        where={"model__name": "s128", "algo__num_minibatches": 2},
    ),
}  # fmt: skip
HOLLOW = {"nvfp4": ORANGE}
LOOKS = {("naive", "fp8_block"): PRECISION_LOOKS["fp8_block"]}
"""Without a correction the format's, for there the format is what differs."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """An arm by length: AUC minus that of bf16, and the median mismatch."""

    gaps: dict[int, Estimate]
    kls: dict[int, Estimate]


Drawing = dict[str, dict[Pair, Line]]
"""By the panel's title."""


def look(method: str, precision: str) -> Look:
    """The method's, but for LOOKS and the colours of HOLLOW."""
    if precision in HOLLOW:
        return Look(colour=HOLLOW[precision], dash=METHODS[method].dash, marker=METHODS[method].marker)
    return LOOKS.get((method, precision), METHODS[method])


def draw(results: Path) -> Drawn:
    """AUC minus that of bf16, and mismatch, by the number of elements to sort; panels that have arms.

    Raises ValueError without results of the first panel's sweep.
    """
    drawing = in_panels(results, PANELS, _lines)
    numbers = pd.DataFrame(
        {"sweep": PANELS[title].sweep, "method": pair[0], "precision": pair[1], "n": n, "seeds": gap.seeds}
        | gap.cells("AUC - bf16")
        | line.kls[n].cells("median k3, nats")
        for title, lines in drawing.items()
        for pair, line in lines.items()
        for n, gap in line.gaps.items()
    )
    return Drawn(figure=_figure(drawing), numbers=numbers, says=tuple(_says(drawing)))


def _lines(found: Found, panel: Panel) -> dict[Pair, Line]:
    """The panel's arms, at lengths that bf16 has too."""
    lengths = sorted({int(a.fields["task.n"]) for a in found.arms})
    controls = {n: a for n in lengths if (a := arm(found, "bf16", task__n=n, **panel.where)) is not None and scored(a)}
    lines: dict[Pair, Line] = {}
    for pair in panel.pairs:
        inside = {n: a for n in controls if (a := arm(found, *pair, task__n=n, **panel.where)) is not None}
        if inside:
            lines[pair] = Line(
                gaps={n: difference(auc(a), auc(controls[n])) for n, a in inside.items()},
                kls={n: geometric(floored(summary(a, "k3_median"))) for n, a in inside.items()},
            )
    return lines


def _figure(drawing: Drawing) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.4, 4.2), layout="constrained")
        axes: Any = figure.subplots(2, len(drawing), sharex="col", sharey="row", squeeze=False)
        for (top, bottom), (title, lines) in zip(axes.T, drawing.items(), strict=True):
            lengths = sorted({n for line in lines.values() for n in line.gaps})
            for index, (pair, line) in enumerate(lines.items()):
                shift = 0.01 * (lengths[-1] - lengths[0] or 1) * (index - (len(lines) - 1) / 2)
                for ax, values in ((top, line.gaps), (bottom, line.kls)):
                    draw_points(ax, list(values), list(values.values()), look(*pair), shift)
            top.set_title(title)
            top.axhline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
            bottom.set_xticks(lengths, [str(n) for n in lengths])
            bottom.set_xlabel("digits to sort, n")
        every = [line for lines in drawing.values() for line in lines.values()]
        top, bottom = axes[:, 0]
        top.set_ylabel("AUC minus that of bf16")
        least = min(e.value for line in every for e in line.gaps.values())
        top.set_ylim(least - 0.15, 0.2)  # intervals of few seeds may be longer than the page
        bottom.set_ylabel("median k3, nats per token")
        bottom.set_yscale("log")
        bottom.minorticks_off()
        kl = [e.value for line in every for e in line.kls.values()]
        bottom.set_ylim(min(kl) / 3, max(kl) * 5)
        named: dict[tuple[str, Look], list[str]] = {}
        for method, precision in dict.fromkeys(pair for lines in drawing.values() for pair in lines):
            named.setdefault((method, look(method, precision)), []).append(precision)
        legend(figure, {f"{method} {', '.join(found)}": own for (method, own), found in named.items()}, columns=4)
        note(
            figure,
            "A response has n + 1 tokens; the paper's gap opens at thousands. Bars: 95 % intervals over seeds.",
        )
    return figure


def _says(drawing: Drawing) -> Iterator[str]:
    """Block FP8, at the shortest and at the longest answers."""
    for title, lines in drawing.items():
        for pair, line in lines.items():
            if pair[1] == "fp8_block":
                first, last = min(line.gaps), max(line.gaps)
                gaps = [f"{line.gaps[n]} at n = {n} ({called(line.gaps[n])})" for n in (first, last)]
                kls = [f"{line.kls[n].value:.1e}" for n in (first, last)]
                yield f"{title}, {pair[0]}: {', '.join(gaps)}; median k3 {' and '.join(kls)} nats."
