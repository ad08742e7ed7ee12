"""Looks while seeds arrive: Pocock's constants, an independent multivariate normal, chances by simulation, and the
errors of the whole rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats as distributions

from harness.devtools.bench import look_worlds, verdict_worlds
from harness.records import stats
from harness.records.sweep_file import Until


@pytest.mark.parametrize(
    ("alpha", "num_looks", "bound"),
    [
        (0.05, 2, 2.178), (0.05, 3, 2.289), (0.05, 4, 2.361), (0.05, 5, 2.413), (0.05, 10, 2.555),
        (0.01, 2, 2.772), (0.01, 5, 2.986), (0.1, 2, 1.875), (0.1, 5, 2.122),
    ],
)  # fmt: skip
def test_the_constants_of_pocock(alpha: float, num_looks: int, bound: float) -> None:
    """Pocock 1977; Jennison and Turnbull, Group Sequential Methods (2000), table 2.1: equal groups."""
    level = stats.level_per_look(tuple(range(1, num_looks + 1)), alpha)
    assert float(distributions.norm.isf(level / 2)) == pytest.approx(bound, abs=6e-4)


@pytest.mark.parametrize("sizes", [(3, 5, 6), (2, 3, 9), (4, 5, 12)])
def test_the_recursion_is_the_multivariate_normal(sizes: tuple[int, ...]) -> None:
    """The z values at two looks correlate by the root of the ratio of their sizes."""
    n = np.array(sizes, dtype=float)
    cov: Any = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    for level in (0.05, 0.01):
        bound = np.full(len(n), distributions.norm.isf(level / 2))
        inside = distributions.multivariate_normal.cdf(bound, cov=cov, lower_limit=-bound, abseps=1e-7, releps=1e-7)
        assert stats.crossing_chance(sizes, level) == pytest.approx(1 - inside, abs=1e-5)
    level = stats.level_per_look(sizes, 0.033)
    assert stats.crossing_chance(sizes, level) == pytest.approx(0.033, abs=1e-8) and 0.033 / len(sizes) < level < 0.033


def test_one_look_has_the_whole_level_and_many_have_little() -> None:
    assert stats.level_per_look((7,), 0.033) == 0.033
    assert stats.level_per_look(tuple(range(3, 13)), 0.033) == pytest.approx(0.00815, abs=5e-6)


def judged(mean: float, sd: float, units: int, df: float, level: float = 0.99) -> stats.Judged:
    half = float(distributions.t.ppf(0.5 + level / 2, df)) * sd / math.sqrt(units)
    decision = stats.Decision(
        verdict="cannot tell", low=mean - half, high=mean + half, level=level, p=0.5, p_equal=0.5, p_adjusted=0.5,
        sd=sd, df=df,
    )  # fmt: skip
    contrast = stats.Contrast(mean=mean, variance=sd**2, num_units=units, df=units - 1)
    return stats.Judged(verdict="cannot tell", rate=stats.rate(0, units), contrast=contrast, decision=decision)


@pytest.mark.parametrize(("mean", "sd"), [(-0.03, 0.03), (0.0, 0.015), (0.02, 0.01), (0.0, 0.1), (0.4, 0.1)])
def test_the_chance_to_decide_is_that_of_simulated_units(mean: float, sd: float) -> None:
    """A flat prior: the true difference is normal around the mean so far, further units around it."""
    rng, units, more, df = np.random.default_rng(0), 5, 7, 12.0
    truth = rng.normal(mean, sd / math.sqrt(units), 40_000)
    end = (units * mean + more * rng.normal(truth, sd / math.sqrt(more))) / (units + more)
    half = distributions.t.ppf(0.995, df + more) * sd / math.sqrt(units + more)
    decided = (np.abs(end) > half) | (np.abs(end) + half < stats.DELTA)
    found = stats.chance_to_decide(judged(mean, sd, units, df), more)
    assert found == pytest.approx(decided.mean(), abs=0.01)


@pytest.mark.parametrize(
    ("mean", "sd", "units", "df", "expected"),
    [(-0.015, 0.024, 13, 60.0, 4), (0.0, 0.03, 5, 12.0, 16), (-0.1, 0.1, 5, 12.0, 12), (0.03, 0.03, 10, 9.0, 3),
     (0.01, 2.0, 100, 99.0, math.inf), (0.0, math.nan, 1, 0.0, None)],
)  # fmt: skip
def test_the_units_that_decide_are_the_fewest_with_a_chance_of_80_percent(
    mean: float, sd: float, units: int, df: float, expected: float | None
) -> None:
    assert stats.units_to_decide(mean, sd, units, df, 0.99) == expected
    if expected is None:
        return
    found = judged(mean, sd, units, df)
    chances = [stats.chance_to_decide(found, more) for more in range(1, stats.MOST + 1)]
    assert np.diff(chances).min() > -1e-12
    below = next((more for more, chance in enumerate(chances, 1) if chance >= 0.8), math.inf)
    assert below == expected


def test_a_small_mean_needs_more_than_a_difference_of_the_margin_would() -> None:
    """11 units more show a true difference of 0.03 with a chance of 80 %, but decide with one of 29 % at a mean of
    0.015."""
    mean, sd, units = -0.015, 0.04, 13
    critical = distributions.t.ppf(0.995, units + 10)
    power = distributions.nct.sf(critical, units + 10, stats.DELTA * math.sqrt(units + 11) / sd)
    assert power == pytest.approx(0.8, abs=0.02)
    assert stats.chance_to_decide(judged(mean, sd, units, units - 1), 11) == pytest.approx(0.29, abs=0.005)
    assert stats.units_to_decide(mean, sd, units, units - 1, 0.99) == 27


def test_a_difference_may_have_to_lie_beyond_a_bound() -> None:
    """A mean on the bound shows soon that it is not 0, but late on which side of the bound it lies."""
    assert stats.units_to_decide(0.03, 0.03, 10, 9.0) == 1
    assert stats.units_to_decide(0.03, 0.03, 10, 9.0, far=0.03) == 601  # 2 (1 - Φ(1.964 / √(611 / 10 - 1))) = 0.800
    assert stats.units_to_decide(0.0, 0.03, 10, 9.0, 0.99, far=0.03) == stats.units_to_decide(0.0, 0.03, 10, 9.0, 0.99)


def test_further_units_are_printed_in_one_way() -> None:
    found = [stats.further(more) for more in (4.0, math.inf, math.nan, None)]
    assert found == ["(+4)", "(>1000)", "", ""]


def test_what_a_look_says_of_an_arm() -> None:
    def step(found: stats.Judged, seeds: int = 5) -> str:
        return stats.next_step(found, seeds, 12, 0.1)

    wide, close = judged(0.0, 0.1, 5, 4), judged(-0.04, 0.03, 5, 12)
    assert stats.chance_to_decide(wide, 7) < 0.05 < 0.3 < stats.chance_to_decide(close, 7)
    assert (step(wide), step(close), step(close, seeds=12)) == ("hopeless", "more seeds", "out of seeds")
    assert stats.next_step(wide, 5, 12, 0.0) == "more seeds"
    assert step(replace(wide, verdict="equal")) == step(replace(wide, verdict="collapses in 1 of 5")) == "decided"
    frozen = stats.Judged(verdict=stats.NO_SIGNAL, rate=stats.rate(0, 5), contrast=None, decision=None)
    assert step(frozen) == step(frozen, seeds=12) == "no signal"
    unknown = stats.Judged(verdict="no control", rate=stats.rate(0, 1), contrast=None, decision=None)
    assert step(unknown) == "more seeds"


def test_looks_at_one_level_err_as_rarely_as_promised_and_unadjusted_ones_do_not() -> None:
    """Arms that do not differ, looked at from 3 to 14 seeds: at the level of a single look every tenth is "decided"."""
    rule, truth = Until(max_seeds=14, hopeless=0), np.zeros(1)
    level = stats.level_per_look(rule.sizes, stats.ALPHA)
    world = verdict_worlds.World(low=0.2, high=0.2, control=0.2)  # so noisy that none can be called equal
    found, naive = (
        look_worlds.ends(world, 0, truth, rule, 120, np.random.default_rng(1), alpha).errors
        for alpha in (level, stats.ALPHA)
    )
    assert found.wrong <= stats.ALPHA + 3 * math.sqrt(stats.ALPHA * (1 - stats.ALPHA) / 120)
    assert naive.wrong > 0.1 and found.covers > naive.covers


def test_a_setting_stops_giving_seeds_to_frozen_hopeless_and_decided_arms() -> None:
    def runs(effect: float, spread: float, has_moved: bool = True) -> stats.Outcomes:
        values = [0.7 + effect + spread * (seed % 3 - 1) for seed in range(9)]
        return {(seed, seed): stats.Outcome(value=value, start=0.3, end=value, has_moved=has_moved)
                for seed, value in enumerate(values)}  # fmt: skip

    rule, control = Until(max_seeds=9), runs(0, 0)
    arms = [runs(-0.3, 0.01), runs(0, 0, has_moved=False), runs(-0.045, 0.025), runs(0, 0.2)]
    level = stats.level_per_look(rule.sizes, stats.ALPHA)
    found, taken, steps, looks = look_worlds.run(control, arms, rule, level)
    assert [one.verdict for one in found] == ["worse", stats.NO_SIGNAL, "worse", "cannot tell"]
    assert steps == ["decided", "no signal", "decided", "hopeless"]
    # t of the third arm over its first 4 seeds is 4.28 (p = 0.023 with 3 degrees of freedom), over 5 it is 5.35
    # (0.006): below 2/3 of the level, since one other of three arms is decided.
    assert [taken[i] for i in (0, 1, 3)] == [3, 3, 3] and taken[2] == 5 and looks == 3


def test_a_frozen_arm_is_counted_as_wrong_where_it_gets_another_verdict() -> None:
    world, frozen = look_worlds.WORLDS["3 of 12 arms never move"]
    truth = verdict_worlds.TRUTHS["some differ"]
    found = look_worlds.ends(world, frozen, truth, Until(max_seeds=5), 4, np.random.default_rng(0), 0.01)
    assert found.steps["no signal"] == 3 / 12 and sum(found.steps.values()) == pytest.approx(1)
    assert 3 <= found.seeds <= 5 and found.looks >= 1


def test_the_table_has_a_row_for_every_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_worlds, "RULES", (("short", Until(max_seeds=4), ("none differs",)),))
    notes = list[str]()
    text = "\n".join(look_worlds.lines(2, np.random.default_rng(0), notes.append))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(look_worlds.WORLDS) == 1 + len(notes)
    assert all(len(row.split("|")) == 14 for row in rows)
