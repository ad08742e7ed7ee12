"""Tests of what a factor adds to the dose: format, length, size and engine, kind of dose and channel spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import t as student

from harness.records.stats import LEVEL, MIN_CLUSTERS, Floats, holm
from harness.studies.dose.curve import explained
from harness.studies.dose.points import FORMAT, Point

KNOTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)
"""Bends of the curve in the logarithm (base 10) of the dose: straight between them."""
DRAWS = 1999
MIN_RUNS = 4
"""Levels of a factor with fewer runs are put together."""
FACTORS: dict[str, Callable[[Point], str]] = {
    "format": lambda p: p.precision,
    "length": lambda p: str(p.length),
    "size": lambda p: p.size,
    "engine": lambda p: p.engine,
}

WITHIN: dict[str, Callable[[Point], str]] = {
    "kind": lambda p: p.kind,
    "spread": lambda p: f"{p.spread:g}",
}
"""Factors that are tested on the bases where they vary: no other base tells their levels apart."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One factor beside the dose."""

    factor: str
    num_levels: int
    num_runs: int
    num_bases: int
    r2_dose: float
    """Share of the variance between runs that the curve of the dose explains."""
    r2_both: float
    """The same with a mean of its own for every level."""
    p: float
    """Wild cluster bootstrap; NaN for fewer than two levels, and where all losses are equal."""
    p_holm: float
    """Adjusted for the factors tested together (Holm)."""
    lowest: tuple[str, float]
    """The level with the smallest loss beyond the dose, and its mean residual."""
    highest: tuple[str, float]


def additions(points: Sequence[Point]) -> list[Addition]:
    """Every factor beside the dose, over runs of one correction that did not collapse."""
    return _adjusted([_test(points, name, level) for name, level in FACTORS.items()])


def additions_within(points: Sequence[Point]) -> list[Addition]:
    """Additions of the kind of a dose and of the channel spread, each over the runs of the bases where it varies, those
    that predictions are for among them; runs of one task and correction that did not collapse."""
    found: list[Addition] = []
    for name, level in WITHIN.items():
        levels: dict[str, set[str]] = {}
        for p in points:
            levels.setdefault(p.base, set()).add(level(p))
        if shared := [p for p in points if len(levels[p.base]) > 1]:
            found.append(_test(shared, name, level))
    return _adjusted(found)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs of one kind of dose beside those of formats on the same bases."""

    kind: str
    num_runs: int
    num_bases: int
    num_collapsed: int
    dose: float
    """Median over the runs that did not collapse; NaN where all did."""
    loss: float
    """Mean over the same."""
    beyond: float
    """Loss beyond that of formats at an equal dose on the same base; NaN where no run tells."""
    low: float
    """Its 95 % interval, bases as clusters; NaN for fewer than three."""
    high: float


def kinds(points: Sequence[Point]) -> list[Kind]:
    """Every kind of dose on the bases where there are several, formats first; runs of one task and correction."""
    by_base: dict[str, set[str]] = {}
    for p in points:
        by_base.setdefault(p.base, set()).add(p.kind)
    shared = [p for p in points if len(by_base[p.base]) > 1]
    alive = [p for p in shared if not p.has_collapsed]
    found: list[Kind] = []
    for name in sorted({p.kind for p in shared}, key=lambda kind: (kind != FORMAT, kind)):
        runs, own = [p for p in shared if p.kind == name], [p for p in alive if p.kind == name]
        beyond, low, high = (0.0, math.nan, math.nan) if name == FORMAT else _effect(alive, name)
        found.append(
            Kind(
                kind=name, num_runs=len(runs), num_bases=len({p.base for p in runs}),
                num_collapsed=len(runs) - len(own),
                dose=float(np.median([p.dose for p in own])) if own else math.nan,
                loss=float(np.mean([p.loss for p in own])) if own else math.nan,
                beyond=beyond, low=low, high=high,
            )
        )  # fmt: skip
    return found


def _effect(points: Sequence[Point], kind: str) -> tuple[float, float, float]:
    """(loss of a kind beyond that of formats, its 95 % interval): least squares on the broken line of the dose, a level
    for every base and one for every other kind.

    Cluster-robust variance with the factor G / (G - 1) over the G bases that have the kind, Student's t with G - 1
    degrees of freedom; no interval below MIN_CLUSTERS. NaN where nothing tells the kind apart.
    """
    y = np.array([p.loss for p in points])
    bases = np.array([p.base for p in points])
    names = np.array([p.kind for p in points])
    own = (names == kind).astype(np.float64)
    levels = [bases == one for one in np.unique(bases)]
    levels += [names == one for one in np.unique(names) if one not in (FORMAT, kind)]
    q = _orthonormal(np.concatenate([curve_columns(np.array([p.dose for p in points])), np.stack(levels, 1)], axis=1))
    x, left = own - q @ (q.T @ own), y - q @ (q.T @ y)
    size = float(x @ x)
    if size < 1e-9 or FORMAT not in names:
        return math.nan, math.nan, math.nan
    effect = float(x @ left) / size
    scores = x * (left - effect * x)
    having = np.unique(bases[names == kind])
    if len(having) < MIN_CLUSTERS:
        return effect, math.nan, math.nan
    sums = np.array([scores[bases == one].sum() for one in np.unique(bases)])
    error = math.sqrt(len(having) / (len(having) - 1) * float((sums**2).sum())) / size
    width = float(student.ppf(0.5 + LEVEL / 2, len(having) - 1)) * error
    return effect, effect - width, effect + width


def _adjusted(found: Sequence[Addition]) -> list[Addition]:
    known = [a for a in found if not math.isnan(a.p)]
    adjusted = dict(zip((a.factor for a in known), holm([a.p for a in known]), strict=True))
    return [replace(a, p_holm=adjusted.get(a.factor, math.nan)) for a in found]


def curve_columns(doses: Floats) -> Floats:
    """Columns of a broken line in log10 of the dose, [N, 2 + len(KNOTS)]."""
    x = np.log10(np.maximum(doses, 1e-6))
    return np.stack([np.ones_like(x), x, *(np.maximum(x - knot, 0) for knot in KNOTS)], axis=1)


def wild_bootstrap_p(
    y: Floats, small: Floats, large: Floats, clusters: Sequence[str], rng: np.random.Generator
) -> float:
    """P-value of what the columns [N, K] of `large` add to those of `small`, errors free within clusters.

    Residuals of the small model change sign cluster by cluster (Cameron, Gelbach, Miller, Rev. Econ. Stat. 90, 2008:
    wild cluster bootstrap with the null imposed, Rademacher weights); the statistic is F's ratio of sums of squares.
    """
    q_small, q_large = _orthonormal(small), _orthonormal(large)
    names, place = np.unique(np.array(clusters), return_inverse=True)
    fit = q_small @ (q_small.T @ y)
    signs = rng.choice(np.array([-1.0, 1.0]), size=(DRAWS, len(names)))[:, place]
    worlds = np.concatenate([y[None], fit + signs * (y - fit)])
    total = (worlds**2).sum(1)
    without, with_factor = (total - ((worlds @ q) ** 2).sum(1) for q in (q_small, q_large))
    gain = (without - with_factor) / np.maximum(with_factor, 1e-300)
    return float((1 + (gain[1:] >= gain[0] * (1 - 1e-9)).sum()) / (DRAWS + 1))


def _test(points: Sequence[Point], factor: str, level: Callable[[Point], str]) -> Addition:
    names = [level(p) for p in points]
    names = [name if names.count(name) >= MIN_RUNS else f"under {MIN_RUNS} runs" for name in names]
    levels = sorted(set(names))
    y, doses = np.array([p.loss for p in points]), np.array([p.dose for p in points])
    small = curve_columns(doses)
    large = np.concatenate([small, np.stack([[name == one for name in names] for one in levels], 1)], axis=1)
    clusters = [p.base for p in points]
    left = y - (q := _orthonormal(small)) @ (q.T @ y)
    means = {one: float(left[[name == one for name in names]].mean()) for one in levels}
    both = y - (q := _orthonormal(large)) @ (q.T @ y)
    tested = len(levels) > 1 and np.ptp(y) > 0
    p = wild_bootstrap_p(y, small, large, clusters, np.random.default_rng(0)) if tested else math.nan
    return Addition(
        factor=factor, num_levels=len(levels), num_runs=len(points), num_bases=len(set(clusters)),
        r2_dose=explained(y, left), r2_both=explained(y, both), p=p, p_holm=math.nan,
        lowest=min(means.items(), key=lambda kv: kv[1]), highest=max(means.items(), key=lambda kv: kv[1]),
    )  # fmt: skip


def _orthonormal(columns: Floats) -> Floats:
    """Orthonormal basis of the span of the columns, [N, rank]."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    return u[:, s > 1e-10 * s[0]]
