"""Whole distributions of runs: performance profiles, and the probability of improvement over several settings at once.

A profile is the share of runs that score above tau, for every tau (arXiv 2108.13264, section 4.2): unlike a mean it
shows that one run in three collapsed. A line is a method and variant at one precision, its strata are the contexts
(lengths, model sizes), and a run scores its AUC. Left out: scores per context, which are in
`harness.report.leaderboard`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records import stats
from harness.records.arms import Arm, control_of, label
from harness.records.stats import Floats
from harness.report.plots.colours import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, VERMILION
from harness.report.plots.style import close_grid, style_name
from harness.report.plots.titles import BASELINE, score_words
from harness.report.scores import Scores, on_common_bases

TAUS = np.linspace(0, 1, 201)
MAX_LINES = 5
"""Lines of a panel: control and BASELINE, then the best; a grey print tells no more apart."""
MAX_PLACES = 2
"""Settings that a title or an axis names; more of them do not fit."""
MAX_NAME = 18
"""Characters of a name that leave room for a second column of a legend."""
LOOKS: tuple[tuple[str, Any], ...] = (
    (BLUE, "-"), (GREEN, (0, (5, 1.5))), (PINK, (0, (1.2, 1.2))), (ORANGE, (0, (5, 1.2, 1.2, 1.2))),
    (SKY, (0, (8, 1.5))), (GREY, (0, (3, 1, 1, 1, 1, 1))),
)  # fmt: skip
"""(colour, dash) of the lines beyond control and baseline."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Share of runs above each threshold, with a band that holds the whole curve at once. All [N] float64."""

    taus: Floats
    fraction: Floats
    low: Floats
    high: Floats
    num_runs: int


def profile(strata: Sequence[Floats], taus: Floats) -> Profile:
    """The profile of runs in strata of equal weight; `strata` holds the scores [n_k] of each.

    The band is Dvoretzky, Kiefer and Wolfowitz's with Massart's constant, at the effective number of runs
    1 / sum(w^2): a run of stratum k weighs 1 / (K n_k). Unlike a bootstrap it stays honest for 3 runs: +-0.78.
    """
    strata = [scores for scores in strata if len(scores)]
    if not strata:
        empty = np.full_like(taus, math.nan)
        return Profile(taus=taus, fraction=empty, low=empty, high=empty, num_runs=0)
    fraction = np.mean([np.mean(scores[:, None] > taus, axis=0) for scores in strata], axis=0)
    effective = len(strata) ** 2 / sum(1 / len(scores) for scores in strata)
    half = math.sqrt(math.log(2 / (1 - stats.LEVEL)) / (2 * effective))
    return Profile(
        taus=taus, fraction=fraction, low=np.clip(fraction - half, 0, 1), high=np.clip(fraction + half, 0, 1),
        num_runs=sum(map(len, strata)),
    )  # fmt: skip


def run_scores(scores: Scores) -> Floats:
    """The AUC of every scored run of an arm, [n]."""
    return np.array(list(scores.auc.values()), dtype=np.float64)


def improvements(arms: Sequence[Arm], scores: Mapping[str, Scores], control: str) -> pd.DataFrame:
    """P(arm > control) over all contexts that have both, one row per method, precision and variant. `scores`: by label.

    Columns: arm, settings (how many contexts), runs, and improvement with its ends as in the leaderboard. Empty where
    the sweep has a single context.
    """
    lines: dict[tuple[str, str], list[Arm]] = {}
    for arm in arms:
        lines.setdefault((arm.precision, style_name(arm)), []).append(arm)
    rows: list[dict[str, Any]] = []
    for (precision, name), members in lines.items():
        pairs = [(arm, control_of(arm, arms, control)) for arm in members]
        compared = [(scores[a.label], scores[c.label]) for a, c in pairs if c is not None and c is not a]
        strata = [each for pair in compared if (each := on_common_bases(*pair)).num_bases]
        if len(strata) > 1:
            found = stats.improvement(strata)
            rows.append(
                {
                    "arm": f"{name} {precision}",
                    "settings": len(strata),
                    "runs": sum(len(each.arm) for each in strata),
                    "improvement": found.probability,
                    "improvement_low": found.low,
                    "improvement_high": found.high,
                }
            )
    return pd.DataFrame(rows)


def profile_figure(arms: Sequence[Arm], scores: Mapping[str, Scores], control: str = "bf16") -> Figure | None:
    """A panel per precision with the control, the baseline and its best methods, of those that ran in most settings of
    the control. Lines of fewer than `stats.MIN_SEEDS` runs say nothing and are left out; None without two others.
    `scores`: by label."""
    lines: dict[tuple[str, str], dict[str, Floats]] = {}
    for arm in arms:
        if len(found := run_scores(scores[arm.label])):
            lines.setdefault((arm.precision, style_name(arm)), {})[label(arm.context)] = found
    reference = next((key for key in lines if key[1] == control), None)
    if reference is not None:
        lines = {
            key: {place: found for place, found in strata.items() if place in lines[reference]}
            for key, strata in lines.items()
        }
    lines = {key: strata for key, strata in lines.items() if sum(map(len, strata.values())) >= stats.MIN_SEEDS}
    contexts = [place for place in dict.fromkeys(label(arm.context) for arm in arms)
                if any(place in strata for strata in lines.values())]  # fmt: skip
    reference = reference if reference in lines else None
    precisions = [p for p in dict.fromkeys(p for p, _ in lines) if reference is None or p != reference[0]]
    if not precisions or len(lines) < 2:
        return None
    columns = min(3, len(precisions))
    rows = math.ceil(len(precisions) / columns)
    figure = Figure(figsize=(2.35 * columns + 0.3, 2.3 * rows + 0.3), layout="constrained")
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax, precision in zip(axes.flat, precisions, strict=False):
        inside = {name: strata for (p, name), strata in lines.items() if p == precision}
        _panel(ax, precision, inside, None if reference is None else (control, lines[reference]), contexts)
    close_grid(axes, len(precisions))
    names = ", ".join(contexts) if len(contexts) <= MAX_PLACES else f"{len(contexts)} settings"
    over = f" over {names}" if len(contexts) > 1 else ""
    figure.supxlabel(f"tau: {score_words(arms)}{over}", fontsize=8)
    figure.supylabel("share of runs above tau\n(bands: 95 %, whole curve)", fontsize=8)
    return figure


def _panel(
    ax: Axes,
    precision: str,
    inside: dict[str, dict[str, Floats]],
    reference: tuple[str, dict[str, Floats]] | None,
    contexts: Sequence[str],
) -> None:
    def score(name: str) -> float:
        return float(np.mean([scores.mean() for scores in inside[name].values()]))

    places = max(inside.values(), key=len).keys()
    whole = [name for name in inside if inside[name].keys() == places]
    ranked = sorted((name for name in whole if name != BASELINE), key=score, reverse=True)
    room = MAX_LINES - (reference is not None) - (BASELINE in whole)
    shown: list[tuple[str, dict[str, Floats], str, Any]] = [
        (name, inside[name], *look) for name, look in zip(ranked[:room], LOOKS, strict=False)
    ]
    if BASELINE in whole:
        shown.insert(0, (BASELINE, inside[BASELINE], VERMILION, "-"))
    num_shown = len(shown)
    if reference is not None:
        name, strata = reference
        shown.insert(0, (name, {place: found for place, found in strata.items() if place in places}, INK, "-"))
    for index, (_, strata, colour, dash) in enumerate(shown):
        found = profile(list(strata.values()), TAUS)
        ax.step(found.taus, found.fraction, where="post", color=colour, linestyle=dash, linewidth=1.2, zorder=3)
        if index < 2:  # more bands than two are a grey wall
            ax.fill_between(found.taus, found.low, found.high, step="post", color=colour, alpha=0.07, linewidth=0)
    said = [precision]  # a line each
    if len(places) < len(contexts):
        said += [*map(str, places)] if len(places) <= MAX_PLACES else [f"{len(places)} of {len(contexts)} settings"]
    if num_shown < len(inside):
        said.append(f"{num_shown} of {len(inside)} methods")
    ax.set_title("\n".join(said))
    handles = [Line2D([], [], color=c, linestyle=d, linewidth=1.2, label=name) for name, _, c, d in shown]
    columns = 2 if max(len(name) for name, *_ in shown) <= MAX_NAME else 1
    ax.legend(
        handles=handles, fontsize=5.5, loc="upper left", ncols=columns, handlelength=2, labelspacing=0.25,
        columnspacing=1,
    )  # fmt: skip
    room_above = 0.1 * math.ceil(len(handles) / columns) + 0.03  # the legend stands above the curves, never on them
    ax.set_ylim(-0.03, max(ax.get_ylim()[1], 1.03 + room_above))
    ax.set_yticks(np.linspace(0, 1, 6))
