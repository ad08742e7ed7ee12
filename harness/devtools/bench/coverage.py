"""A simulation of how often the intervals of `harness.records.stats` hold, and how often verdicts are wrong.

Three worlds. `spread`: seeds differ (s.d. 0.03 of accuracy) and arms differ question by question. `answers`: seeds
are equal and only answers are luck. `collapse`: three runs in ten of either arm fall to 0.2. A truth is known in each,
new data are drawn many times, and 95 % of the intervals ought to hold it. Two controls must fail: a t interval over
seeds held against new questions, and rliable's bootstrap of few runs. Then what verdicts do: how often they are
wrong, and whether the number of further seeds they ask for is enough. Verdicts of a whole setting in hard worlds are in
`bench.verdict_worlds`, of one that is looked at while its seeds arrive in `bench.look_worlds`, words on single bases in
`bench.base_worlds`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from harness.devtools.bench import base_worlds, look_worlds, runner, verdict_worlds
from harness.devtools.bench.coverage_figure import INTERVALS, draw
from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.foundation.whole_file import write_atomic
from harness.records import stats
from harness.records.paths import figures_folder, tables_folder
from harness.records.stats import Floats
from harness.records.stats.improvement import wins
from harness.report.plots.profiles import profile

World = Literal["spread", "answers", "collapse"]
WORLDS: tuple[World, ...] = ("spread", "answers", "collapse")
SIZES = (2, 3, 4, 5, 6, 8, 10)
NUM_QUESTIONS = 64
EFFECT = 0.02
"""True mean difference of the two arms."""
SEED_SD = 0.03
LEVEL = 0.55
"""Accuracy of the second arm."""
COLLAPSE, FALLEN = 0.3, 0.2
"""Share of runs that collapse, and their accuracy."""
DRAWS = 400
Hits = Mapping[str, float]
"""Interval -> share of simulations in which it held the truth."""


def coverage(world: World, num_seeds: int, sims: int, rng: np.random.Generator) -> dict[str, float]:
    """Share of `sims` simulations in which each interval holds the truth. `collapse` leaves out the IQM, which is
    another quantity there, and the probabilities of improvement, which have a world of their own (`chances`)."""
    draws = stats.resample(num_seeds, NUM_QUESTIONS, rng, DRAWS)
    found: dict[str, list[bool]] = {}

    def note(name: str, low: float, high: float, truth: float) -> None:
        found.setdefault(name, []).append(low <= truth <= high)

    level = LEVEL if world != "collapse" else (1 - COLLAPSE) * LEVEL + COLLAPSE * FALLEN
    effect = EFFECT if world != "collapse" else (1 - COLLAPSE) * EFFECT
    for _ in range(sims):
        x, y, of_questions = _two_arms(world, num_seeds, rng)
        note("mean", *stats.bootstrap(y, draws), level)
        if world != "collapse":
            note("iqm", *stats.bootstrap(y, draws, stats.iqm), level)
        by_seed = stats.paired(dict(enumerate(x.mean(axis=1))), dict(enumerate(y.mean(axis=1))))
        both = stats.crossed(x, y)
        note("paired", by_seed.low, by_seed.high, effect + of_questions)
        note("paired_new", by_seed.low, by_seed.high, effect)
        note("crossed", both.low, both.high, effect)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _two_arms(world: World, num_seeds: int, rng: np.random.Generator) -> tuple[Floats, Floats, float]:
    """Answers of two arms [S, Q], and what these questions add to their true difference."""
    sd = 0.0 if world == "answers" else SEED_SD
    hard = rng.uniform(-0.05, 0.05, NUM_QUESTIONS)  # bounded, so that no chance leaves [0, 1] and the truth is known
    taste = rng.uniform(-0.3, 0.3, NUM_QUESTIONS) * (world != "answers")
    arms: list[Floats] = []
    added: list[Floats] = []
    for shift, own in ((EFFECT, taste), (0.0, 0.0 * taste)):
        chance = LEVEL + shift + rng.normal(0, sd, (num_seeds, 1)) + hard + own
        if world == "collapse":
            chance = np.where(rng.random((num_seeds, 1)) < COLLAPSE, FALLEN, chance)
        arms.append((rng.random(chance.shape) < chance.clip(0, 1)).astype(float))
        added.append(hard + own)
    share = 1 - COLLAPSE if world == "collapse" else 1.0
    return arms[0], arms[1], share * float(np.mean(added[0] - added[1]))


def chances(num_runs: int, probability: float, sims: int, rng: np.random.Generator) -> dict[str, float]:
    """Coverage of the intervals of P(X > Y) where X and Y are normal with equal spread and P(X > Y) is as given, and of
    the profile of X. The second setting has the same probability."""
    shift = math.sqrt(2) * NormalDist().inv_cdf(probability)
    taus = np.linspace(-4, 4 + shift, 60)
    truth = np.array([1 - NormalDist(shift).cdf(tau) for tau in taus])
    found: dict[str, list[bool]] = {}
    for _ in range(sims):
        strata = [stats.Stratum(rng.normal(shift, 1, num_runs), rng.normal(0, 1, num_runs)) for _ in range(2)]
        for name, interval in (
            ("improvement", stats.improvement(strata[:1])),
            ("improvement_two", stats.improvement(strata)),
            ("improvement_bootstrap", improvement_bootstrap(strata[:1], rng, DRAWS)),
        ):
            found.setdefault(name, []).append(interval.low <= probability <= interval.high)
        band = profile([strata[0].arm], taus)
        found.setdefault("profile", []).append(bool(np.all((band.low <= truth) & (truth <= band.high))))
    return {name: float(np.mean(values)) for name, values in found.items()}


def improvement_bootstrap(
    strata: Sequence[stats.Stratum], rng: np.random.Generator, draws: int = 1000
) -> stats.Improvement:
    """rliable's interval of P(X > Y): runs drawn again with replacement within every stratum and arm, percentiles. With
    3 to 5 runs it is too narrow, down to nothing where all runs of one arm win."""
    point = float(np.mean([stats.won(x, y) for x, y, _ in strata]))
    total = np.zeros(draws)
    for x, y, _ in strata:
        a = x[rng.integers(len(x), size=(draws, len(x)))]
        b = y[rng.integers(len(y), size=(draws, len(y)))]
        total += wins(a, b)
    low, high = np.quantile(total / len(strata), [0.5 - stats.LEVEL / 2, 0.5 + stats.LEVEL / 2])
    return stats.Improvement(probability=point, low=float(low), high=float(high))


def against_zero(values: Floats) -> stats.Difference:
    """The paired contrast of some differences."""
    return stats.paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))


def verdicts(num_seeds: int, sd: float, effect: float, sims: int, rng: np.random.Generator) -> dict[str, float]:
    """Share of each verdict over paired normal differences of that effect and s.d."""
    counts = dict.fromkeys(("better", "equal", "worse", "cannot tell"), 0)
    for row in rng.normal(effect, sd, (sims, num_seeds)):
        found = against_zero(row)
        counts[stats.verdict(found.low, found.high)] += 1
    return {name: count / sims for name, count in counts.items()}


def advised(
    num_pilot: int, sd: float, effect: float, sims: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """(share of pilots that cannot tell, share of those with a verdict after the advice, median number of seeds then);
    the latter two are NaN where every pilot tells.

    A pilot that cannot tell is given the seeds that `units_to_decide` asks for by its own mean and s.d.; the verdict is
    on all of them. One that asks for more than `stats.MOST` stays without.
    """
    hits: list[bool] = []
    sizes: list[int] = []
    for _ in range(sims):
        values = rng.normal(effect, sd, num_pilot)
        found = against_zero(values)
        if stats.verdict(found.low, found.high) != "cannot tell":
            continue
        more = stats.units_to_decide(found.mean, found.sd, num_pilot, num_pilot - 1)
        assert more is not None
        if math.isfinite(more):
            values = np.concatenate([values, rng.normal(effect, sd, int(more))])
            found = against_zero(values)
        hits.append(stats.verdict(found.low, found.high) != "cannot tell")
        sizes.append(len(values))
    if not hits:
        return 0.0, math.nan, math.nan
    return len(hits) / sims, float(np.mean(hits)), float(np.median(sizes))


def tabulate(
    sims: int, rng: np.random.Generator, note: Callable[[str], None]
) -> tuple[str, dict[str, dict[int, Hits]]]:
    """The Markdown of everything, and world -> size -> coverage for the figure."""
    found: dict[str, dict[int, Hits]] = {}
    for world in WORLDS:
        note(f"coverage: {world}")
        found[world] = {size: coverage(world, size, sims, rng) for size in SIZES}
    for probability in (0.5, 0.75, 0.95):
        note(f"coverage: P(X > Y) = {probability}")
        found[f"P(X > Y) = {probability}"] = {size: chances(size, probability, sims, rng) for size in SIZES}
    error = 1.96 * math.sqrt(0.95 * 0.05 / sims)
    lines = [
        "# Coverage of the intervals",
        "",
        f"Share of {sims} simulations in which a 95 % interval held the truth, by number of seeds. 95 % coverage "
        f"itself would show as 0.950 ± {error:.3f}. Made by `python -m harness.devtools.bench coverage --write`.",
        "",
    ]
    rows = list[tuple[str, ...]]()
    for world, by_size in found.items():
        for name in INTERVALS:
            if name in by_size[SIZES[0]]:
                cells = (f"{by_size[size][name]:.3f}" for size in SIZES)
                rows.append((world, INTERVALS[name], *cells))
    lines.append(markdown_table(("world", "interval", *map(str, SIZES)), rows, align="llr"))
    note("coverage: verdicts")
    lines += ["", *_verdict_lines(sims, rng), "", *verdict_worlds.lines(3 * sims, np.random.default_rng(1), note)]
    lines += ["", *base_worlds.lines(sims, np.random.default_rng(3), note)]
    lines += ["", *look_worlds.lines(max(1, sims * 3 // 10), np.random.default_rng(2), note)]
    return "\n".join(lines) + "\n", found


def _verdict_lines(sims: int, rng: np.random.Generator) -> list[str]:
    lines = [
        "## Verdicts", "",
        f"Paired differences are normal; s.d. {SEED_SD:g} between pairs, equal means within ±{stats.DELTA:g}.", "",
    ]  # fmt: skip
    rows = list[tuple[str, ...]]()
    for effect in (0.0, stats.DELTA, 0.1):
        for size in (3, 5, 8, 16):
            share = verdicts(size, SEED_SD, effect, sims, rng)
            rows.append((f"{effect:g}", str(size), *(f"{value:.3f}" for value in share.values())))
    head = ("true difference", "seeds", "better", "equal", "worse", "cannot tell")
    lines += [
        markdown_table(head, rows, align="r"),
        "", "## Seeds asked for", "",
        "(+n) plans for a verdict with a chance of 80 %, by the mean and the s.d. of the seeds that were seen (the "
        "pilot), which few seeds know badly. Decided: of the pilots that cannot tell, with these seeds more; one that "
        f"asks for more than {stats.MOST} stays undecided.", "",
    ]  # fmt: skip
    rows = list[tuple[str, ...]]()
    for effect in (0.0, stats.DELTA, 0.06):
        for pilot in (3, 5, 8):
            undecided, decided, size = advised(pilot, SEED_SD, effect, sims, rng)
            cells = (f"{undecided:.3f}", number_cell(decided), number_cell(size, ".0f"))
            rows.append((f"{effect:g}", str(pilot), *cells))
    head = ("true difference", "pilot", "cannot tell", "decided", "seeds in all, median")
    return [*lines, markdown_table(head, rows, align="r")]


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the simulation."""
    parser.add_argument("--sims", type=int, default=1000, help="simulations per row (default: 1000)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument("--write", action="store_true", help="write the table and the figure into the results folder")


def command(given: argparse.Namespace) -> int:
    """Print the tables; with --write, write `tables/stats_coverage.md` and `figures/stats/coverage.png`."""
    runner.check_positive(given, "sims")
    text, found = tabulate(given.sims, np.random.default_rng(0), print)
    if given.write:
        table = tables_folder(given.results) / "stats_coverage.md"
        write_atomic(table, text.encode())
        for path in (table, *draw(found, figures_folder(given.results, "stats") / "coverage.png")):
            print(f"written: {path}")
    else:
        print(text)
    return 0
