"""The whole study over a set of runs, and its finding in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.foundation.number_cell import with_interval
from harness.studies.dose.beyond import Addition, Kind, additions, additions_within, kinds
from harness.studies.dose.candidates import Candidate, candidates
from harness.studies.dose.curve import Bin, Reached, bins, fitted, predicted, reached
from harness.studies.dose.points import FORMAT, NONE, Point, curve_points

TASK = "sort"
"""The task with enough runs for a curve; runs of others are held against it."""
TESTED = (NONE, "TIS")
"""Corrections with enough sizes and lengths to test what adds to the dose, and to compare doses."""
MIN_RUNS = 20
"""Corrections with fewer runs have no curve."""
NAMED = 0.1
"""Loss of accuracy that sentences and the figure's title name."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that the page and the figure show."""

    points: list[Point]
    """Runs of TASK."""
    others: list[Point]
    """Runs of other tasks."""
    dosed: list[Point]
    """Runs of TASK whose dose no format makes."""
    bins: list[Bin]
    reached: list[Reached]
    additions: dict[str, list[Addition]]
    candidates: dict[str, list[Candidate]]
    within: dict[tuple[str, str], list[Addition]]
    """Task and correction -> what the kind of dose and the channel spread add, where they vary."""
    kinds: dict[tuple[str, str], list[Kind]]
    """Task and correction -> kinds of dose on shared bases, where there are several."""


def study(points: Sequence[Point]) -> Study:
    """The whole study of these runs. Curves and all that hangs on them are of doses that formats make, and of runs that
    no prediction is for; kinds of dose and channel spreads are compared over all. Raises ValueError where too few runs
    of TASK without a correction are among them."""
    every, points = points, curve_points(points)
    own = [p for p in points if p.task == TASK]
    counts = Counter(p.correction for p in own)
    if counts[NONE] < MIN_RUNS:
        raise ValueError(f"dose: {counts[NONE]} runs of {TASK} without a correction; it takes at least {MIN_RUNS}")
    shown = [name for name, num in counts.most_common() if num >= MIN_RUNS]
    shown.sort(key=lambda name: (name != NONE, -counts[name]))
    own = sorted((p for p in own if p.correction in shown), key=lambda p: shown.index(p.correction))
    tested = {name: alive(own, name) for name in TESTED}
    tested = {name: inside for name, inside in tested.items() if len({p.held_out for p in inside}) > 1}
    groups: dict[tuple[str, str], list[Point]] = {}
    for p in every:
        groups.setdefault((p.task, p.correction), []).append(p)
    within = {key: additions_within([p for p in inside if not p.has_collapsed]) for key, inside in groups.items()}
    compared = {key: kinds(inside) for key, inside in groups.items()}
    return Study(
        points=own, others=[p for p in points if p.task != TASK],
        dosed=[p for p in every if p.task == TASK and p.kind != FORMAT], bins=bins(own),
        reached=reached(own, [name for name in TESTED if name in shown], NONE),
        additions={name: additions(inside) for name, inside in tested.items()},
        candidates={name: candidates(inside) for name, inside in tested.items()},
        within={key: found for key, found in within.items() if found},
        kinds={key: found for key, found in compared.items() if found},
    )  # fmt: skip


def finding(s: Study) -> str:
    """The finding in one line: the figure's title."""
    rows = {r.correction: r for r in s.reached if r.loss == NAMED}
    words = [
        f"{'without a correction' if name == NONE else f'with {name}'} at "
        + with_interval(row.dose, row.low, row.high, ".2g")
        for name, row in rows.items()
        if math.isfinite(row.dose)
    ]
    if not words:
        return f"No dose that was run costs {NAMED:g} of accuracy"
    return f"{NAMED:g} of accuracy is lost {', '.join(words)} of k3 x length (sorting digits)"


def alive(points: Iterable[Point], correction: str) -> list[Point]:
    """The runs with a correction that did not collapse."""
    return [p for p in points if p.correction == correction and not p.has_collapsed]


def prediction(s: Study, correction: str, dose: float) -> float:
    """Loss that the curve of a correction over TASK gives for a dose; NaN where no run makes one."""
    own = alive(s.points, correction)
    if not own:
        return math.nan
    curve = fitted(np.array([p.dose for p in own]), np.array([p.loss for p in own]))
    return float(predicted(curve, np.array([dose]))[0])
