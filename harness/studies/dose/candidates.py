"""Candidate doses, compared by the error of their curves on sizes and lengths that were left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.records.stats import Floats, mean_interval
from harness.studies.dose.curve import explained, fitted, predicted
from harness.studies.dose.points import DOSE, Point


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One dose: a never-falling curve is fitted without a size, length and engine, and predicts their runs."""

    name: str
    num_runs: int
    rmse: float
    """Root mean square error of a held-out run, in accuracy."""
    r2: float
    """Share of the variance between runs that the held-out prediction explains; below 0: worse than the mean."""
    worse: float
    """Mean squared error less that of k3 x length on the same runs, over 1e-4."""
    worse_low: float
    """Its 95 % interval, bases as clusters."""
    worse_high: float


def candidates(points: Sequence[Point]) -> list[Candidate]:
    """Every dose that all these runs have, the best first; runs of one correction that did not collapse."""
    y, bases = np.array([p.loss for p in points]), [p.base for p in points]
    own = held_out_errors(points, DOSE) ** 2
    found: list[Candidate] = []
    for name in points[0].doses if points else ():
        if not all(math.isfinite(p.doses[name]) for p in points):
            continue
        errors = held_out_errors(points, name)
        squares = errors**2
        low, high = mean_interval((squares - own) * 1e4, bases)
        found.append(
            Candidate(
                name=name, num_runs=len(points), rmse=math.sqrt(float(squares.mean())),
                r2=explained(y, errors),
                worse=float((squares - own).mean()) * 1e4, worse_low=low, worse_high=high,
            )
        )  # fmt: skip
    return sorted(found, key=lambda c: c.rmse)


def held_out_errors(points: Sequence[Point], name: str) -> Floats:
    """Loss less its prediction by a curve from the runs of other sizes, lengths and engines, [N].

    Runs of one place alone are predicted by nothing else: NaN where no other place is there.
    """
    y, doses = np.array([p.loss for p in points]), np.array([p.doses[name] for p in points])
    places = np.array([p.held_out for p in points])
    found = np.full(len(points), np.nan)
    for place in dict.fromkeys(p.held_out for p in points):
        inside = places == place
        if not inside.all():
            found[inside] = y[inside] - predicted(fitted(doses[~inside], y[~inside]), doses[inside])
    return found
