"""Titles of figures: what they show in words, computed from the leaderboard and the curves that are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.records.arms import Arm
from harness.records.stats import COLLAPSES, MIN_SEEDS
from harness.records.sweep_file import BASELINES
from harness.report.plots.bands import Band
from harness.report.verdicts import PREFIXES, loss_on_bases

BASELINE = BASELINES[-1]


def panel_title(precision: str, arms: Iterable[Arm], *, board: Mapping[str, Any], site: str) -> str:
    """A panel's precision, and below it what the uncorrected arm loses; the precision alone where none was compared."""
    prefix = PREFIXES[site]
    difference = f"{prefix}difference"
    for arm in arms:
        row = board.get(arm.label)
        if arm.method == BASELINE and not arm.variant and row is not None and not math.isnan(row[difference]):
            said = loss_on_bases(row, prefix) or str(row[f"{prefix}verdict"]).replace(f"{COLLAPSES} in", "falls")
            word = "1 seed" if row["seeds"] == 1 else said.replace(" of ", "/")
            return f"{precision}\n{BASELINE} {row[difference]:+.2f}: {word}"
    return precision


def score_words(arms: Iterable[Arm]) -> str:
    """The score of the arms for an axis: a mean over training, or the end where it was evaluated there alone."""
    is_mean = {
        any(len({e.step for e in run.evals if e.site == "reference" and e.step}) > 1 for run in arm.runs)
        for arm in arms
    }
    if is_mean == {True, False}:
        return "accuracy at the end, or its mean during training,"
    return "mean accuracy during training" if True in is_mean else "accuracy at the end"


def scores_title(arms: Sequence[Arm], board: Mapping[str, Any], control: str) -> str:
    """Counts of the verdicts of all arms that were compared with the control, of which a sweep with
    variants may have several."""
    rows = [board[arm.label] for arm in arms if not math.isnan(board[arm.label]["difference"])]
    if not rows:
        return "No arm has a control to be compared with"
    if all(row["is_preliminary"] for row in rows):
        return f"Fewer than {MIN_SEEDS} seeds: nothing is decided against {control}"
    if len({board[row["control"]]["variant"] for row in rows}) > 1:
        control = "their control"
    said = {
        f"better than {control}": sum(row["verdict"] == "better" for row in rows),
        f"equal to {control}": sum(row["verdict"] == "equal" for row in rows),
        f"worse than {control}": sum(row["verdict"] == "worse" for row in rows),
        "with runs that collapse": sum(str(row["verdict"]).startswith(COLLAPSES) for row in rows),
    }
    single = [words for row in rows if (words := loss_on_bases(row))]
    said[single[0] if len(single) == 1 else "lower or below on some bases"] = len(single)
    clear = ", ".join(f"{count} {words}" for words, count in said.items() if count)
    left = len(rows) - sum(said.values())
    arms_compared = "1 arm" if len(rows) == 1 else f"{len(rows)} arms"
    undecided = f"; {left} undecided" if left and clear else ""
    return f"Of {arms_compared}: {clear or 'none decided'}{undecided}"


def largest_title(bands: Mapping[str, Band], *, words: str, control: str) -> str:
    """The arm with the largest median of its curve, and how many times that of the control.

    `bands`: by the arm's label, in their order.
    """
    levels = {name: float(np.nanmedian(band.middle)) for name, band in bands.items() if np.isfinite(band.middle).any()}
    if not levels:
        return ""
    name = max(levels, key=lambda key: levels[key])
    low = [value for key, value in levels.items() if key.split()[0] == control and value > 0]
    times = f", {_plain(levels[name] / low[0])} times that of {control}" if low and levels[name] > low[0] else ""
    return f"{words} is largest for {name}: {_plain(levels[name], 2)}{times}"


def _plain(value: float, digits: int = 3) -> str:
    """So many digits; a large number without an exponent, as 16,600."""
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.0f}" if value >= 10**digits else rounded


def slope_title(bands: Mapping[str, Band], *, words: str, control: str) -> str:
    """Smallest and largest ratio of a curve's second half to its first, control left out."""
    ratios: dict[str, float] = {}
    for name, band in bands.items():
        known = np.flatnonzero(np.isfinite(band.middle) & (band.middle > 0))
        if name.split()[0] != control and len(known) > 1:
            first, second = np.array_split(band.middle[known], 2)
            ratios[name] = float(second.mean() / first.mean())
    if not ratios:
        return ""
    low, high = f"{min(ratios.values()):.2g}", f"{max(ratios.values()):.2g}"
    times = low if low == high else f"{low} to {high}"
    return f"{words}: {times} times as large in the second half of the axis"
