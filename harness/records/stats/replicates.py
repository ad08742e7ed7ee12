"""An arm against its control when bases and runs are replicated: what is a unit, and what varies in it.

A run has a base seed (the model it starts from) and a run seed (its prompts and samples). Where both have one seed per
run the units are the pairs of runs. A control with several runs on a base enters by their mean, so that no arm leans on
one unlucky control. Where every base has the same run seeds, base and run seed are crossed random effects.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from harness.records.stats.decisions import Contrast
from harness.records.stats.differences import crossed_variance
from harness.records.stats.intervals import Floats, mean_squares

Value = TypeVar("Value")
Key = tuple[Any, Any]
"""(base, run seed), each hashable."""


def contrast(arm: Mapping[Key, float], control: Mapping[Key, float], can_pool: bool = True) -> Contrast:
    """Arm minus control over the bases that both have, each by the mean of its runs there.

    One base: the units are its run seeds that both have. Two or more bases, each with the same two or more run seeds
    in both arms: seeds crossed, with Satterthwaite's degrees of freedom. Otherwise the units are the bases.
    """
    ours, theirs = by_base(arm), by_base(control)
    bases = [base for base in ours if base in theirs]
    if len(bases) == 1:
        base = bases[0]
        common = [seed for seed in ours[base] if seed in theirs[base]]
        if len(common) > 1:
            return _over(np.array([ours[base][seed] - theirs[base][seed] for seed in common]), can_pool)
    seeds = set(ours[bases[0]]) if bases else set[Hashable]()
    if len(bases) > 1 and len(seeds) > 1 and all(set(x[base]) == seeds for x in (ours, theirs) for base in bases):
        d = np.array([[ours[base][seed] - theirs[base][seed] for seed in seeds] for base in bases])
        variance, df = crossed_variance(d)
        return Contrast(
            mean=float(d.mean()), variance=variance * len(bases), num_units=len(bases), df=df, can_pool=can_pool
        )
    return _over(np.array([_mean(ours[base]) - _mean(theirs[base]) for base in bases]), can_pool)


@dataclass(frozen=True, kw_only=True)
class Components:
    """Standard deviations of an arm's score, each taken alone; NaN where the data do not tell."""

    base: float
    """Between bases, shared by all arms."""
    run: float
    """Between runs on one base. Without replicates it has in it what bases do to single arms."""
    evaluation: float
    """Luck of single answers in one run's score."""
    has_replicates: bool
    """True where `run` is from runs that share arm and base."""


def components(arms: Mapping[str, Mapping[Key, float]], answers: Mapping[str, Floats]) -> Components:
    """Variance components of scores. `answers` per arm is [S runs, Q questions], a run's mean score on each.

    Evaluation: the mean square of runs by questions over Q. Run: from replicates, runs of one arm on one base, where
    there are any, else the mean square of arms by bases; less the evaluation part. Base: what the arms' scores on one
    base have in common. Estimates below 0 are 0.
    """
    noise = [mean_squares(x)[2] / x.shape[1] for x in answers.values() if min(x.shape) > 1]
    evaluation = float(np.mean(noise)) if noise else math.nan
    cells = {name: by_base(runs) for name, runs in arms.items()}
    within, df = pooled_variance(list(runs.values()) for bases in cells.values() for runs in bases.values())
    common = [base for base in next(iter(cells.values()), {}) if all(base in bases for bases in cells.values())]
    between = rest = math.nan
    if len(common) > 1 and len(cells) > 1:
        table = np.array([[_mean(bases[base]) for bases in cells.values()] for base in common])
        ms_bases, _, rest = mean_squares(table)
        between = max(0.0, ms_bases - rest) / len(cells)
    if df:
        rest = within
    run = max(0.0, rest - (0.0 if math.isnan(evaluation) else evaluation))
    return Components(
        base=math.sqrt(between), run=math.sqrt(run) if not math.isnan(rest) else math.nan,
        evaluation=math.sqrt(evaluation), has_replicates=df > 0,
    )  # fmt: skip


def by_base(runs: Mapping[Key, Value]) -> dict[Any, dict[Any, Value]]:
    """Base -> run seed -> what belongs to that run."""
    found: dict[Any, dict[Any, Value]] = {}
    for (base, seed), value in runs.items():
        found.setdefault(base, {})[seed] = value
    return found


def pooled_variance(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """(variance within groups, its degrees of freedom); NaN and 0 where no group has two values."""
    squares, df = 0.0, 0
    for values in groups:
        if len(values) > 1:
            squares += float(np.var(values, ddof=1)) * (len(values) - 1)
            df += len(values) - 1
    return (squares / df if df else math.nan), df


def _mean(values: Mapping[Hashable, float]) -> float:
    return sum(values.values()) / len(values)


def _over(d: Floats, can_pool: bool) -> Contrast:
    n = len(d)
    return Contrast(
        mean=float(d.mean()) if n else math.nan, variance=float(d.var(ddof=1)) if n > 1 else math.nan,
        num_units=n, df=float(max(n - 1, 0)), can_pool=can_pool,
    )  # fmt: skip
