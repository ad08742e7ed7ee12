"""Laws of the cost of a step in model size N and response length L, their ratio, and where it crosses 1.

    seconds = f + a L + b N L + c L^2        (generation, and all that touches every token)
    seconds = f + b N                        (the push of weights, and everything where only sizes vary)

All coefficients are at least 0, so a law grows with size and length and is safe to extend. Fitted to relative errors.
A term that the data cannot tell (one size only, two lengths only) is left out. Source of the form: a decoding step
reads all weights once (N) and a cache that grows with the response (L), beside a fixed overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from harness.records.stats import Floats
from harness.studies.break_even.costs import STAGES, StepCost

TERMS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "1": lambda n, length: np.ones(np.broadcast(n, length).shape),
    "L": lambda n, length: length + 0 * n,
    "N": lambda n, length: n + 0 * length,
    "NL": lambda n, length: n * length,
    "LL": lambda n, length: length**2 + 0 * n,
}
SIZE_REACH, LENGTH_REACH = 8.0, 4.0
"""Factors by which a law is extended beyond the largest measured size and length."""
GRID = 121


@dataclass(frozen=True, kw_only=True)
class Law:
    """Seconds of one stage."""

    coefficients: Mapping[str, float]
    """Term of TERMS -> coefficient >= 0."""

    def __call__(self, size: Floats, length: Floats) -> Floats:
        terms = [value * TERMS[name](size, length) for name, value in self.coefficients.items()]
        return np.sum(terms, axis=0)


def fit(sizes: Floats, lengths: Floats, seconds: Floats, stage: str = "generate") -> Law:
    """Non-negative least squares of relative errors. All [n]; zeros count as a nanosecond."""
    n_sizes, n_lengths = len(np.unique(sizes)), len(np.unique(_rounded(lengths)))
    names = ["1"]
    if stage == "sync" or n_lengths < 2:
        names += ["N"] if n_sizes > 1 else []
    else:
        names += ["L"] + (["NL"] if n_sizes > 1 else []) + (["LL"] if n_lengths > 2 else [])
    weight = 1 / np.maximum(seconds, 1e-9)
    design = np.stack([TERMS[name](sizes, lengths) * weight for name in names], axis=1)
    scale = np.linalg.norm(design, axis=0)
    found = nnls(design / scale, np.ones(len(seconds)))[0] / scale
    return Law(coefficients=dict(zip(names, found.tolist(), strict=True)))


def _rounded(lengths: Floats) -> Floats:
    """Lengths that seeds let differ by a few per cent are one length."""
    return np.round(np.log(lengths) / np.log(1.15))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Cost of the control's step over that of an arm's, by their laws."""

    arm: Mapping[str, Law]
    control: Mapping[str, Law]

    def __call__(self, size: Floats, length: Floats) -> Floats:
        costs = [np.sum([law(size, length) for law in laws.values()], axis=0) for laws in (self.control, self.arm)]
        return costs[0] / costs[1]

    def along(self, axis: str, at: float, x: Floats) -> Floats:
        """The speedup over [n] values `x` of one axis ("size" or "length"), the other held at `at`."""
        held = np.full_like(x, at)
        return self(x, held) if axis == "size" else self(held, x)


def fit_speedup(arm: Sequence[StepCost], control: Sequence[StepCost]) -> Speedup:
    """A law per stage of each, through the median steps of its settings; not empty."""
    return Speedup(arm=_laws(arm), control=_laws(control))


def typical(costs: Sequence[StepCost]) -> list[StepCost]:
    """The median step of every size and length, stage by stage: a run that shared its processor is an outlier."""
    return [
        StepCost(
            size=float(np.median([c.size for c in cell])),
            length=float(np.median([c.length for c in cell])),
            seconds={stage: float(np.median([c.seconds[stage] for c in cell])) for stage in STAGES},
        )
        for cell in _cells(costs)
    ]


def _cells(costs: Sequence[StepCost]) -> list[list[StepCost]]:
    cells: dict[tuple[float, float], list[StepCost]] = {}
    for cost in costs:
        cells.setdefault((cost.size, float(_rounded(np.array(cost.length)))), []).append(cost)
    return list(cells.values())


def _laws(costs: Sequence[StepCost]) -> dict[str, Law]:
    costs = typical(costs)
    sizes, lengths = (np.array([getattr(c, name) for c in costs], dtype=np.float64) for name in ("size", "length"))
    return {stage: fit(sizes, lengths, np.array([c.seconds[stage] for c in costs]), stage) for stage in STAGES}


def resampled(costs: Sequence[StepCost], rng: np.random.Generator) -> list[StepCost]:
    """Runs drawn again with replacement within every size and length."""
    return [cell[i] for cell in _cells(costs) for i in rng.integers(len(cell), size=len(cell))]


def fewest_alike(costs: Sequence[StepCost]) -> int:
    """The fewest runs of any size and length: with one of them `resampled` has nothing to draw there."""
    return min(map(len, _cells(costs)))


def crossing(ratio: Callable[[Floats], Floats], low: float, high: float) -> float | None:
    """The smallest x in [low, high] from which on `ratio` stays above 1 up to `high`; None where it ends below 1.

    `low` itself where it is above 1 throughout. On a logarithmic grid, with the crossing interpolated.
    """
    x = np.geomspace(low, high, GRID)
    above = np.log(ratio(x))
    if above[-1] <= 0:
        return None
    below = np.flatnonzero(above <= 0)
    if not len(below):
        return low
    i = int(below[-1])
    share = -above[i] / (above[i + 1] - above[i])
    return float(x[i] * (x[i + 1] / x[i]) ** share)
