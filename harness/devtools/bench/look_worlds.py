"""Rates of wrong verdicts where seeds are given one after another until arms are decided; part of `bench.coverage`.

The worlds, truths and judgement are those of `verdict_worlds`, with one world more, in which some arms never move. The
rule is that of `lowbit sweep --until-decided` (`stats.next_step` at the level of `stats.level_per_look`): arms that are
decided, hopeless or without a signal get no further seed. Verdicts are counted as they stand at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.devtools.bench import verdict_worlds
from harness.devtools.bench.verdict_worlds import NUM_ARMS, START, World
from harness.foundation.markdown_table import markdown_table
from harness.records import stats
from harness.records.stats import Floats
from harness.records.sweep_file import Until

FROZEN = 3
"""Arms that never move, in the world that has such arms."""
WORLDS: Mapping[str, tuple[World, int]] = {
    **{name: (world, 0) for name, world in verdict_worlds.WORLDS.items()},
    f"{FROZEN} of {NUM_ARMS} arms never move": (World(), FROZEN),
}
"""Name -> (spread of runs, number of arms that never move)."""

RULES: tuple[tuple[str, Until, tuple[str, ...]], ...] = (
    ("up to 12 seeds, hopeless arms given up", Until(max_seeds=12), tuple(verdict_worlds.TRUTHS)),
    ("up to 12 seeds, none given up", Until(max_seeds=12, hopeless=0), ("none differs",)),
    ("up to 24 seeds, hopeless arms given up", Until(max_seeds=24), ("none differs",)),
)
"""(words, rule, truths): the default rule, and two with more looks where every verdict but "equal" is wrong."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Shares over many settings that ran until they were decided."""

    errors: verdict_worlds.Errors
    steps: Mapping[str, float]
    """Step at the last look -> share of the arms."""
    seeds: float
    """Seeds of an arm, on average."""
    looks: float


def ends(
    world: World, frozen: int, truth: Floats, until: Until, sims: int, rng: np.random.Generator, alpha: float
) -> Ends:
    """Draw `sims` settings, give seeds by the rule, and hold the last verdicts against the truth.

    `alpha` is the level of the step-up at every look.
    """
    tally, steps, num_seeds, num_looks = verdict_worlds.Tally(world, truth, frozen), Counter[str](), 0, 0
    for _ in range(sims):
        control, arms = verdict_worlds.draw(world, truth, until.max_seeds, rng)
        arms = [_still(arm) for arm in arms[:frozen]] + arms[frozen:]
        found, taken, last, looks = run(control, arms, until, alpha)
        tally.add(found, taken)
        num_seeds, num_looks = num_seeds + sum(taken), num_looks + looks
        steps.update(last)
    total = sims * len(truth)
    return Ends(
        errors=tally.errors(), steps={name: count / total for name, count in steps.items()},
        seeds=num_seeds / total, looks=num_looks / sims,
    )  # fmt: skip


def run(
    control: stats.Outcomes, arms: list[stats.Outcomes], until: Until, alpha: float
) -> tuple[list[stats.Judged], list[int], list[stats.Step], int]:
    """(the last verdicts, seeds of each arm, how each arm ended, number of looks)."""
    taken, looks = [until.first] * len(arms), 0
    while True:
        looks += 1
        parts = [dict(list(arm.items())[:size]) for arm, size in zip(arms, taken, strict=True)]
        reference = dict(list(control.items())[: max(taken)])
        found = stats.judge([(part, reference) for part in parts], alpha=alpha)
        steps: list[stats.Step] = [
            stats.next_step(one, size, until.max_seeds, until.hopeless) for one, size in zip(found, taken, strict=True)
        ]
        if "more seeds" not in steps:
            return found, taken, steps, looks
        taken = [
            min(size + until.batch, until.max_seeds) if step == "more seeds" else size
            for size, step in zip(taken, steps, strict=True)
        ]


def _still(arm: stats.Outcomes) -> stats.Outcomes:
    return {key: replace(run, value=START, end=START, has_moved=False) for key, run in arm.items()}


def lines(sims: int, rng: np.random.Generator, note: Callable[[str], None]) -> list[str]:
    """The Markdown of every rule, world and truth."""
    at = 1.96 * math.sqrt(0.05 * 0.95 / sims)
    first = RULES[0][1]
    text = [
        "## Verdicts of a setting that runs until it is decided", "",
        "`lowbit sweep NAME --until-decided`: seeds are given one after another, verdicts are looked at after each, "
        "and arms that are decided, hopeless or without a signal get no further one. Every look is at the same level, "
        f"by Pocock's boundaries: {100 * stats.level_per_look(first.sizes, stats.ALPHA):.2f} % for looks at "
        f"{first.first} to {first.max_seeds} seeds, where a single look has {100 * stats.ALPHA:.1f} %. The level is "
        f"from theory and was not fitted to these worlds. {sims} settings per row, counted as they stand at the end; a "
        f"share of 0.050 would show as up to {0.05 + at:.3f} by chance. Decided: collapses in x of n too.",
    ]  # fmt: skip
    heads = ("wrong, of the verdicts", "wrong, of all arms", "interval holds", "collapse rate holds", "decided",
             "hopeless", "out of seeds", "no signal", "seeds of an arm", "looks")  # fmt: skip
    for words, rule, truths in RULES:
        alpha = stats.level_per_look(rule.sizes, stats.ALPHA)
        rows = list[list[str]]()
        for name, (world, frozen) in WORLDS.items():
            note(f"until decided, {words}: {name}")
            for truth in truths:
                found = ends(world, frozen, verdict_worlds.TRUTHS[truth], rule, sims, rng, alpha)
                own = found.errors
                shares = [own.wrong, own.wrong_per_arm, own.covers, own.rate_covers]
                shares += [found.steps.get(step, 0.0) for step in ("decided", "hopeless", "out of seeds", "no signal")]
                cells = [name, truth, *(f"{share:.3f}" for share in shares)]
                rows.append([*cells, f"{found.seeds:.1f}", f"{found.looks:.1f}"])
        drawn = markdown_table(("world", "truth", *heads), rows, align="llr")
        text += ["", f"### From {rule.first} {words}", "", drawn]
    return text
