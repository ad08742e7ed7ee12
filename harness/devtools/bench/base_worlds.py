"""Rates of wrong words on single bases, in worlds that are hard on them; part of `bench.coverage`.

A setting is twelve arms with one run on each base and a control with three, judged by
`harness.records.stats.single_bases` as a report does it. On every base each arm has a difference of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.devtools.bench.verdict_worlds import is_wrong, noise
from harness.foundation.markdown_table import markdown_table
from harness.records import stats

NUM_ARMS = 12
REPLICATES = 3
START, LEVEL = 0.3, 0.7
SD = 0.008
"""Standard deviation of a run of the control, as word problems have it with 2048 questions."""
TRUTHS: Mapping[str, tuple[float, ...]] = {
    "none differs": (0.0,),
    "many at delta": (stats.DELTA, -stats.DELTA, 0.0),
    "bases differ": (0.0, -0.01, -0.02, -0.03, -0.05, -0.1, -0.2, 0.05),
}
"""The differences from which that of an arm on a base is drawn."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Departures from what the rule takes for granted."""

    num_bases: int = 6
    arms: float = 1.0
    """Noise of the arms' runs over that of the control's."""
    loud: float = 1.0
    """The same of every fourth arm."""
    has_heavy_tails: bool = False
    """Student's t with 3 degrees of freedom in place of the normal, at the same standard deviation."""


WORLDS: Mapping[str, World] = {
    "as assumed, 6 bases": World(),
    "as assumed, 2 bases": World(num_bases=2),
    "heavy tails": World(has_heavy_tails=True),
    "every fourth arm twice as noisy": World(loud=2.0),
    "every fourth arm three times as noisy": World(loud=3.0),
    "all arms twice as noisy": World(arms=2.0),
    "all arms three times as noisy": World(arms=3.0),
}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Shares over many settings."""

    wrong: float
    """Wrong share of a setting's words, on average over settings."""
    decided: float
    """Arms on bases with a word."""


def errors(world: World, truth: tuple[float, ...], sims: int, rng: np.random.Generator) -> Errors:
    """Draw `sims` settings, judge them base by base, and hold the words against the truth."""
    shares, decided, total = list[float](), 0, 0
    for _ in range(sims):
        effects = rng.choice(truth, (NUM_ARMS, world.num_bases)).tolist()
        levels = LEVEL + rng.normal(0, 0.1, world.num_bases)
        control = _runs(levels, np.full(REPLICATES, SD), world, rng)
        spreads = SD * world.arms * np.where(np.arange(NUM_ARMS) % 4 == 0, world.loud, 1.0)
        arms = [_runs(levels + np.array(effects[i]), spreads[i : i + 1], world, rng) for i in range(NUM_ARMS)]
        found = stats.on_bases([(arm, control) for arm in arms], stats.run_noise([control]))
        words = [(one.word, float(effects[i][base])) for i, own in enumerate(found) for base, one in own.items()]
        said = [is_wrong(word, effect) for word, effect in words if word != "open"]
        shares.append(sum(said) / max(len(said), 1))
        decided, total = decided + len(said), total + len(words)
    return Errors(wrong=float(np.mean(shares)), decided=decided / total)


def _runs(means: stats.Floats, spreads: stats.Floats, world: World, rng: np.random.Generator) -> stats.Outcomes:
    """Runs by (base, seed): one a spread on every base."""
    values = means[:, None] + spreads * noise(rng, (len(means), len(spreads)), world.has_heavy_tails)
    return {(base, seed): stats.outcome([float(values[base, seed])], START) for base, seed in np.ndindex(values.shape)}


def lines(sims: int, rng: np.random.Generator, note: Callable[[str], None]) -> list[str]:
    """The section of the coverage table."""
    rows = list[tuple[str, ...]]()
    for name, world in WORLDS.items():
        note(f"coverage: single bases, {name}")
        for truth, values in TRUTHS.items():
            found = errors(world, values, sims, rng)
            rows.append((name, truth, f"{found.wrong:.3f}", f"{found.decided:.3f}"))
    return [
        "## Words on single bases", "",
        f"Twelve arms with one run a base, a control with {REPLICATES} (s.d. {SD:g}), whose replicates give the noise "
        f"of all; {sims} settings a row. Wrong: a loss or gain of the other sign or of none, or an \"equal\" whose "
        f"difference is {stats.DELTA:g} or more.", "",
        markdown_table(("world", "truth", "wrong, of the words", "with a word"), rows, align="llr"),
    ]  # fmt: skip
