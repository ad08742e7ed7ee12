"""The probability of improvement against scipy, closed forms and hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.devtools.bench.coverage import improvement_bootstrap
from harness.records import stats


def test_improvement_is_mann_whitney() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 6, 7).astype(float), rng.integers(0, 6, 5).astype(float)
    assert stats.won(x, y) == pytest.approx(scipy_stats.mannwhitneyu(x, y).statistic / 35)
    found = stats.improvement([stats.Stratum(x, y), stats.Stratum(np.array([2.0]), np.array([1.0, 3.0]))])
    assert found.probability == pytest.approx((stats.won(x, y) + 0.5) / 2)


def test_improvement_edges_solve_newcombes_equation() -> None:
    """|theta - estimate| = t sqrt(V(theta)) at both ends, with the variance written out again."""
    x, y = np.array([1.0, 4.0, 5.0, 6.0]), np.array([0.0, 2.0, 3.0])
    found = stats.improvement([stats.Stratum(x, y)])
    assert found.probability == pytest.approx(10 / 12)
    for theta in (found.low, found.high):
        half = 3.5 - 1
        spread = 1 + half * (1 - theta) / (2 - theta) + half * theta / (1 + theta)
        error = scipy_stats.t.ppf(0.975, 5) * math.sqrt(theta * (1 - theta) * spread / 12)
        assert abs(theta - found.probability) == pytest.approx(error, rel=1e-6)


def test_improvement_where_every_run_wins() -> None:
    """The bootstrap claims certainty from three runs; the score interval does not, and two settings narrow it."""
    x, y = np.array([3.0, 4.0, 5.0]), np.array([0.0, 1.0, 2.0])
    one, two = stats.improvement([stats.Stratum(x, y)]), stats.improvement([stats.Stratum(x, y)] * 2)
    assert (one.probability, one.high) == (1.0, 1.0) and 0.2 < one.low < 0.5 < two.low < 0.8
    mirrored = stats.improvement([stats.Stratum(y, x)])
    assert (mirrored.low, mirrored.high) == pytest.approx((0.0, 1 - one.low))
    naive = improvement_bootstrap([stats.Stratum(x, y)], np.random.default_rng(0))
    assert (naive.probability, naive.low, naive.high) == (1.0, 1.0, 1.0)
    single = stats.improvement([stats.Stratum(x[:1], y[:1])])
    assert (single.probability, single.low, single.high) == (1.0, 0.0, 1.0)
    assert math.isnan(stats.improvement([stats.Stratum(x, np.array([]))]).low)


def test_runs_of_a_base_are_no_further_units() -> None:
    """Six bases with three runs each, on which an arm is as good as its control, but better or worse on each."""
    rng, hits = np.random.default_rng(0), {1: 0, 6: 0}
    for _ in range(300):
        base, of_arm = rng.normal(0, 0.02, (6, 1)), rng.normal(0, 0.03, (6, 1))
        x, y = ((base + shift + rng.normal(0, 0.01, (6, 3))).ravel() for shift in (of_arm, 0.0))
        for number in hits:
            found = stats.improvement([stats.Stratum(x, y, number)])
            hits[number] += found.low <= 0.5 <= found.high
    assert hits[1] / 300 < 0.9 < 0.97 < hits[6] / 300
    x, y = rng.normal(0, 1, 6), rng.normal(0, 1, 6)
    assert stats.improvement([stats.Stratum(x, y, 6)]) == stats.improvement([stats.Stratum(x, y)])  # a run a base


def test_improvement_bootstrap_is_scipys() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(0.5, 1, 9), rng.normal(0, 1, 8)
    mine = improvement_bootstrap([stats.Stratum(x, y)], np.random.default_rng(0), 4000)
    theirs = scipy_stats.bootstrap(
        (x, y), lambda a, b: stats.won(a, b), vectorized=False, method="percentile", n_resamples=4000, rng=1
    ).confidence_interval
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)
