"""Strength and decay of the noise (AQN of QeRL, arXiv 2510.11696): the schedules, and what each changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.numerics.noise_schedule import stage, stage_sigma
from harness.published.figures.drawn import Drawn
from harness.published.figures.estimates import Estimate, called, difference
from harness.published.figures.marks import draw_points, draw_rows, note
from harness.published.figures.records import Found, arm, arms, auc, known, load
from harness.records.arms import Arm
from harness.report.plots.colours import REFERENCE
from harness.report.plots.style import COLOURS, DASHES, STYLE, Look, legend

DECAYS = ("exponential", "linear", "cosine", "logarithmic")
AT = 0.03
"""sigma at the start of the sweep's comparison of decays."""
STAGES = 10
LOOKS = {
    decay: Look(colour=colour, dash=dash, marker=marker)
    for decay, colour, dash, marker in zip(DECAYS, COLOURS, ("-", *DASHES), "Ds^v", strict=False)
}


def draw(results: Path) -> Drawn:
    """The four schedules, accuracy against that without noise by decay, and by strength."""
    found = load(results, "ablate_aqn")
    (none,) = known(found, arm(found, "qerl_no_aqn", "nvfp4"))
    strengths, decays = by_strength(found), by_decay(found)
    base = auc(none)
    numbers = pd.DataFrame(
        {
            "sigma start": float(a.fields["knobs.AQN.sigma_start"]),
            "decay": a.fields["knobs.AQN.decay"],
            "stages": a.fields["knobs.AQN.num_stages"],
            "seeds": len(a.runs),
        }
        | difference(auc(a), base).cells("AUC - no noise")
        for a in {id(a): a for a in [*strengths, *decays]}.values()
    )
    gaps = {a.label: difference(auc(a), base) for a in [*strengths, *decays]}
    return Drawn(figure=_figure(strengths, decays, gaps), numbers=numbers, says=_says(strengths, decays, gaps))


def by_strength(found: Found) -> list[Arm]:
    """Exponential decay over ten stages, from the weakest noise to the strongest."""
    chosen = arms(found, "qerl", "nvfp4", knobs__AQN__decay=DECAYS[0], knobs__AQN__num_stages=STAGES)
    return sorted(chosen, key=lambda a: a.fields["knobs.AQN.sigma_start"])


def by_decay(found: Found) -> list[Arm]:
    """Every decay at one strength."""
    fields = {"knobs__AQN__sigma_start": AT, "knobs__AQN__num_stages": STAGES}
    chosen = [arm(found, "qerl", "nvfp4", knobs__AQN__decay=decay, **fields) for decay in DECAYS]
    return [a for a in chosen if a is not None]


def schedule(a: Arm) -> list[float]:
    """sigma at every step of an arm's runs."""
    knobs = {name: a.fields[f"knobs.AQN.{name}"] for name in ("num_stages", "decay")}
    knobs["definition"] = a.fields["knobs.AQN.schedule"]
    steps = int(a.fields["trainer.steps"])
    start, end = (float(a.fields[f"knobs.AQN.sigma_{name}"]) for name in ("start", "end"))
    at = [stage(step, steps, knobs["num_stages"], knobs["definition"]) for step in range(steps)]
    return [stage_sigma(j, start=start, end=end, **knobs) for j in at]


def _figure(strengths: list[Arm], decays: list[Arm], gaps: dict[str, Estimate]) -> Figure:
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(6.75, 2.6), layout="constrained")
        axes: Any = figure.subplots(1, 3)
        left, middle, right = axes
        looks = [(str(a.fields["knobs.AQN.decay"]), a) for a in decays]
        for name, a in looks:
            sigma = schedule(a)
            left.step(range(len(sigma)), sigma, where="post", color=LOOKS[name].colour, linestyle=LOOKS[name].dash)
        left.set(title=f"Schedules from {AT:g}", xlabel="policy step", ylabel="sigma on the norm gains")
        draw_rows(middle, [(name, gaps[a.label], LOOKS[name]) for name, a in looks])
        middle.set(title=f"Decay, from {AT:g}", xlabel="AUC minus no noise")
        xs = [float(a.fields["knobs.AQN.sigma_start"]) for a in strengths]
        draw_points(right, xs, [gaps[a.label] for a in strengths], LOOKS[DECAYS[0]])
        right.set(title="Strength, exponential", xlabel="sigma at the start", ylabel="AUC minus no noise", xscale="log")
        right.set_xticks(xs, [f"{x:g}" for x in xs])
        right.minorticks_off()
        right.axhline(0.0, color=REFERENCE, linewidth=0.8, zorder=1)
        legend(figure, {name: LOOKS[name] for name, _ in looks})
        note(
            figure,
            "Formulas of all decays but the exponential are reconstructed. Bars: 95 % intervals over paired seeds.",
        )
    return figure


def _says(strengths: list[Arm], decays: list[Arm], gaps: dict[str, Estimate]) -> tuple[str, ...]:
    def words(chosen: list[Arm], name: str, form: str) -> str:
        return "; ".join(
            f"{format(a.fields[f'knobs.AQN.{name}'], form)} {gaps[a.label]} ({called(gaps[a.label])})" for a in chosen
        )

    lines = []
    if decays:
        lines.append(f"AUC against no noise, by decay from {AT:g}: {words(decays, 'decay', '')}.")
    if strengths:
        lines.append(f"By strength with exponential decay: {words(strengths, 'sigma_start', 'g')}.")
    helped = [a for a in [*strengths, *decays] if gaps[a.label].low > 0]
    lines.append(
        f"{len({a.label for a in helped})} of {len(gaps)} settings of the noise are clearly above the base without it."
    )
    return tuple(lines)
