"""Rates of wrong verdicts of a setting, in worlds that are hard on them; part of `bench.coverage`.

A setting is twelve arms and one control on common bases, judged together by `harness.records.stats.judge` as a report
does it. Every world is drawn with three truths: some arms differ, none does, or all differ by exactly delta, where
every "equal" is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.foundation.markdown_table import markdown_table
from harness.records import stats
from harness.records.stats import Floats

SIZES = (3, 4, 5, 8)
NUM_ARMS = 12
LEVEL, START, FALLEN = 0.7, 0.3, 0.05
"""Accuracy of the control, of the base, and of a collapsed run."""
SPREAD = 0.03
"""Standard deviation between runs, where the world says nothing else."""
TRUTHS: Mapping[str, Floats] = {
    "some differ": np.array([0, 0, 0, 0, -0.03, -0.03, 0.03, -0.06, -0.1, -0.1, -0.2, -0.2]),
    "none differs": np.zeros(NUM_ARMS),
    "all at delta": stats.DELTA * np.resize([1.0, -1.0], NUM_ARMS),
}


@dataclass(frozen=True, kw_only=True)
class World:
    """Spread of runs. Standard deviations in accuracy."""

    low: float = SPREAD
    high: float = SPREAD
    """The arms' standard deviations, evenly spread between the two on a log scale."""
    is_split: bool = False
    """Half of the arms at `low`, half at `high` instead."""
    control: float = SPREAD
    base: float = 0.02
    """Spread of what a base adds to every arm."""
    shared: float = 0.0
    """Correlation of an arm's runs with the control's, beyond the base."""
    has_heavy_tails: bool = False
    """Student's t with 3 degrees of freedom in place of the normal, at the same standard deviation."""
    collapse: float = 0.0
    """Share of the arms' runs that collapse; the control's never do."""


WORLDS: Mapping[str, World] = {
    "equal spreads": World(),
    "unequal spreads, 0.01 to 0.1": World(low=0.01, high=0.1),
    "two spreads, 0.015 and 0.09": World(low=0.015, high=0.09, is_split=True),
    "heavy tails": World(has_heavy_tails=True),
    "a control three times as noisy": World(low=0.02, high=0.02, control=0.06),
    "arms that move with the control": World(shared=0.8),
    "an arm alone collapses, 10 %": World(collapse=0.1),
    "an arm alone collapses, 20 %": World(collapse=0.2),
    "an arm alone collapses, 30 %": World(collapse=0.3),
    "collapse of 20 %, unequal spreads, heavy tails": World(collapse=0.2, low=0.01, high=0.1, has_heavy_tails=True),
}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Shares over many settings; NaN where there was nothing to count."""

    wrong: float
    """Wrong share of the verdicts of a setting, on average over settings: the false discovery rate."""
    wrong_per_arm: float
    """Wrong share of all arms, judged or not."""
    covers: float
    """Printed intervals of the difference that hold it."""
    rate_covers: float
    """Intervals of the collapse rate that hold it."""
    decided: float
    """Arms with a verdict on their difference."""


class Tally:
    """Counts of the verdicts of settings of one world against their truth."""

    def __init__(self, world: World, truth: Floats, frozen: int = 0) -> None:
        """The first `frozen` arms never move: any verdict on them but "no signal" is wrong."""
        self.world, self.truth, self.frozen = world, truth, frozen
        self.shares, self.held, self.rates = list[float](), list[bool](), list[bool]()
        self.wrong = self.decided = 0

    def add(self, found: Sequence[stats.Judged], num_seeds: Sequence[int]) -> None:
        """One setting: its judged arms, and how many seeds each of them had."""
        wrong = decided = 0
        for index, (effect, one, size) in enumerate(zip(self.truth, found, num_seeds, strict=True)):
            moves = index >= self.frozen
            self.rates.append(one.rate.low <= self.world.collapse * moves <= one.rate.high)
            if one.contrast is None or one.decision is None:
                wrong += moves  # "no signal" of an arm that moves
                continue
            value = FALLEN - LEVEL if one.rate.count == size else float(effect)
            said = one.decision.verdict
            decided += said != "cannot tell"
            wrong += is_wrong(said, value) or not moves
            if not math.isnan(one.decision.low):
                self.held.append(one.decision.low <= value <= one.decision.high)
        self.shares.append(wrong / max(decided, 1))
        self.wrong, self.decided = self.wrong + wrong, self.decided + decided

    def errors(self) -> Errors:
        """Shares over all settings."""
        total = len(self.rates)
        return Errors(
            wrong=float(np.mean(self.shares)), wrong_per_arm=self.wrong / total, covers=float(np.mean(self.held)),
            rate_covers=float(np.mean(self.rates)), decided=self.decided / total,
        )  # fmt: skip


def errors(world: World, truth: Floats, num_seeds: int, sims: int, rng: np.random.Generator) -> Errors:
    """Draw `sims` settings of that many seeds, judge them, and hold the verdicts against the truth."""
    tally = Tally(world, truth)
    for _ in range(sims):
        control, arms = draw(world, truth, num_seeds, rng)
        tally.add(stats.judge([(arm, control) for arm in arms]), [num_seeds] * len(arms))
    return tally.errors()


def is_wrong(word: str, difference: float) -> bool:
    """Does a verdict, or a word on one base, contradict the true difference?"""
    if word in ("better", "higher"):
        return difference <= 0
    if word in ("worse", "lower"):
        return difference >= 0
    return word == "equal" and abs(difference) >= stats.DELTA - 1e-12


def noise(rng: np.random.Generator, size: tuple[int, int], has_heavy_tails: bool) -> Floats:
    """Draws of unit standard deviation: Student's t with 3 degrees of freedom, or the normal."""
    return rng.standard_t(3, size) / math.sqrt(3) if has_heavy_tails else rng.standard_normal(size)


def draw(
    world: World, truth: Floats, num_seeds: int, rng: np.random.Generator
) -> tuple[stats.Outcomes, list[stats.Outcomes]]:
    """(runs of the control, runs of every arm) of one setting, by seed."""
    size = len(truth)
    spreads = np.geomspace(world.low, world.high, size)
    if world.is_split:
        spreads = np.where(np.arange(size) % 2, world.low, world.high)
    drawn = noise(rng, (size + 1, num_seeds), world.has_heavy_tails)
    own = math.sqrt(1 - world.shared**2) * drawn[1:] + world.shared * drawn[0]
    bases = rng.normal(LEVEL, world.base, num_seeds)
    values = bases + truth[:, None] + rng.permutation(spreads)[:, None] * own
    values = np.where(rng.random(values.shape) < world.collapse, FALLEN, values)
    return _outcomes(bases + world.control * drawn[0]), [_outcomes(row) for row in values]


def _outcomes(values: Floats) -> stats.Outcomes:
    return {
        (seed, seed): stats.Outcome(value=float(value), start=START, end=float(value), has_moved=True)
        for seed, value in enumerate(values)
    }


def lines(sims: int, rng: np.random.Generator, note: Callable[[str], None]) -> list[str]:
    """The Markdown of every world, truth and number of seeds."""
    found: dict[tuple[str, str], list[Errors]] = {}
    for name, world in WORLDS.items():
        note(f"verdicts: {name}")
        for words, truth in TRUTHS.items():
            found[name, words] = [errors(world, truth, size, sims, rng) for size in SIZES]
    at = 1.96 * math.sqrt(0.05 * 0.95 / sims)
    text = [
        "## Verdicts of a setting, in hard worlds",
        "",
        f"{NUM_ARMS} arms and a control, {sims} settings per cell, judged as a report judges them. The rule promises "
        "that of the verdicts of a setting at most 5 % are wrong on average (a false discovery rate, so it is per "
        "verdict and not per family), and that every printed interval covers with at least 95 %. A verdict is about "
        f"the runs that did not collapse. A share of 0.050 would show as up to {0.05 + at:.3f} by chance.",
    ]
    for title, value in (
        ("Wrong verdicts, of the verdicts of a setting", lambda e: e.wrong),
        ("Wrong verdicts, of all arms", lambda e: e.wrong_per_arm),
        ("Intervals of the difference that hold it", lambda e: e.covers),
        ("Intervals of the collapse rate that hold it", lambda e: e.rate_covers),
        ("Arms with a verdict on their difference", lambda e: e.decided),
    ):
        rows = [(name, words, *(f"{value(one):.3f}" for one in row)) for (name, words), row in found.items()]
        head = ("world", "truth", *(f"{size} seeds" for size in SIZES))
        text += ["", f"### {title}", "", markdown_table(head, rows, align="llr")]
    return text
