"""Words on single bases: against scipy's t test, on values worked out by hand, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.devtools.bench import base_worlds
from harness.records import stats


def runs(*by_base: list[float], start: float = 0.4) -> stats.Outcomes:
    """Runs of an arm, a list of values a base."""
    return {
        (base, seed): stats.outcome([value], start)
        for base, values in enumerate(by_base)
        for seed, value in enumerate(values)
    }


def test_noise_is_the_pooled_variance_of_replicates() -> None:
    noise = stats.run_noise([runs([0.70, 0.72, 0.71], [0.5]), runs([0.6, 0.62], [0.1, 0.9])])
    # squares 2e-4, 2e-4; the run at 0.1 collapsed, so base 1 of the second arm has no replicate
    assert noise.df == 3 and noise.variance == pytest.approx(4e-4 / 3)
    alone = stats.run_noise([runs([0.7], [0.5])])
    assert alone.df == 0 and math.isnan(alone.variance)


def test_the_interval_of_one_base_is_that_of_a_t_test() -> None:
    arm, control = [0.55], [0.70, 0.72, 0.71]
    noise = stats.run_noise([runs(control)])
    (found,) = stats.on_bases([(runs(arm), runs(control))], noise, alpha=0.05)
    expected = scipy_stats.ttest_ind(arm, control).confidence_interval(0.95)
    assert (found[0].low, found[0].high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found[0].mean == pytest.approx(-0.16) and found[0].word == "lower"


def test_every_word() -> None:
    control = runs(*[[0.700, 0.701, 0.699, 0.700]] * 5)
    arm = runs([0.5], [0.8], [0.705], [0.671], [0.1])
    (found,) = stats.on_bases([(arm, control)], stats.run_noise([control]))
    assert [found[base].word for base in range(5)] == ["lower", "higher", "equal", "open", "collapsed"]
    assert -0.03 < found[2].low < found[2].high < 0.03 and found[0].high < -0.03 < 0.03 < found[1].low
    assert math.isnan(found[4].low) and found[4].mean == pytest.approx(-0.6)


def test_bases_of_one_arm_alone_and_fallen_controls_are_left_out() -> None:
    control = runs([0.7, 0.701], [0.1, 0.7])
    (found,) = stats.on_bases([(runs([0.7], [0.7], [0.7]), control)], stats.run_noise([control]))
    assert list(found) == [0]
    for unknown in ([0.7], [0.7, 0.7], [0.7 - 0.6, 0.4 - 0.3]):
        with pytest.raises(ValueError, match=r"^noise.df=0: no two runs that share arm and base differ; valid: 1 and"):
            stats.on_bases([], stats.run_noise([runs(unknown, start=0.0)]))


@pytest.mark.parametrize("world", [name for name in base_worlds.WORLDS if not name.startswith("all arms")])
@pytest.mark.parametrize("truth", base_worlds.TRUTHS)
def test_words_are_rarely_wrong(world: str, truth: str) -> None:
    sims = 100
    found = base_worlds.errors(base_worlds.WORLDS[world], base_worlds.TRUTHS[truth], sims, np.random.default_rng(1))
    assert found.wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / sims)
    assert found.decided > (0.3 if truth == "bases differ" else 0.01)


def test_runs_three_times_as_noisy_are_too_much() -> None:
    """The control: where no replicate knows of it, the rule cannot hold."""
    world = base_worlds.WORLDS["all arms three times as noisy"]
    found = base_worlds.errors(world, base_worlds.TRUTHS["many at delta"], 200, np.random.default_rng(1))
    assert found.wrong > 0.06
