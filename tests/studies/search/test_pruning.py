import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.studies.search.pruning import (
    WINDOW,
    has_collapsed,
    is_among_lowest,
    is_beaten,
    is_below_half,
    luck_of_best,
    matrix,
    oriented,
    pooled_spread,
    reward_at,
)
from harness.studies.search.spec import Objective, Pruner

AUC = Objective(metric="auc", direction="maximize")
K3 = Objective(metric="k3", direction="minimize", log=True)
SEEDS = (0, 1, 2)


def scores(*values, k3=None):
    return {s: {"auc": v, "k3": k3[s] if k3 else 0.1} for s, v in enumerate(values)}


def test_larger_is_better_once_oriented():
    assert oriented(0.3, AUC) == 0.3
    assert oriented(0.1, K3) == -math.log(0.1) > oriented(0.2, K3)
    assert matrix([scores(0.1, 0.2, 0.3)], (0, 2), AUC).tolist() == [[0.1, 0.3]]


def test_spread_is_the_residual_of_a_two_way_layout():
    # rows 1 and 2 differ by 2 everywhere but for +-0.5 at two seeds: residuals +-0.25 at those, 1 x 2 degrees
    sigma, degrees = pooled_spread(np.array([[0.0, 1.0, 5.0], [2.5, 2.5, 7.0]]))
    assert degrees == 2 and sigma == pytest.approx(math.sqrt(4 * 0.25**2 / 2))


def test_luck_is_the_expected_largest_normal_draw():
    for count in (2, 10, 80):
        expected = np.random.default_rng(0).standard_normal((40_000, count)).max(1).mean()
        assert luck_of_best(count) == pytest.approx(expected, abs=0.04)


def simulated(shift, rng, pruner, num_trials=40, sigma=0.03):
    """Was a trial that is `shift` sigma behind equal others given up after 1 or 2 of 3 seeds?"""
    level = rng.normal(0, 0.05, 3)
    complete = [scores(*(0.5 + level + rng.normal(0, sigma, 3))) for _ in range(num_trials)]
    mine = 0.5 + level + rng.normal(0, sigma, 3) - shift * sigma
    return any(is_beaten(scores(*mine[:k]), complete, SEEDS, [AUC], pruner) for k in (1, 2))


def test_error_rate_and_power_of_the_comparison():
    rng = np.random.default_rng(1)
    pruner = Pruner(alpha=0.05, min_trials=5)
    equal = np.mean([simulated(0.0, rng, pruner) for _ in range(400)])
    better = np.mean([simulated(-1.0, rng, pruner) for _ in range(400)])
    behind = np.mean([simulated(6.0, rng, pruner) for _ in range(200)])
    assert equal <= 2 * 0.05  # two looks
    assert better <= 0.01
    assert behind >= 0.9


def test_a_trial_is_compared_on_its_own_seeds_and_never_without_grounds():
    pruner = Pruner(alpha=0.05, min_trials=3)
    rng = np.random.default_rng(2)
    complete = [scores(*(np.array([0.2, 0.6, 0.6]) + rng.normal(0, 0.005, 3))) for _ in range(6)]
    assert is_beaten(scores(0.2), complete, SEEDS, [AUC], pruner) is None  # low, as all are at seed 0
    reason = is_beaten(scores(0.1), complete, SEEDS, [AUC], pruner)
    assert reason is not None and reason.startswith("auc is behind the best trial by 0.0984")
    assert is_beaten(scores(0.1), complete[:2], SEEDS, [AUC], pruner) is None  # too few to compare with
    assert is_beaten(scores(0.1, 0.1, 0.1), complete, SEEDS, [AUC], pruner) is None  # nothing left to save
    assert is_beaten(scores(0.1), complete, SEEDS, [AUC], Pruner(alpha=0.0, min_trials=3)) is None


def test_a_trial_that_is_better_in_another_objective_stays():
    pruner = Pruner(alpha=0.05, min_trials=3)
    rng = np.random.default_rng(3)
    complete = [
        scores(*(0.6 + rng.normal(0, 0.005, 3)), k3=list(0.1 * np.exp(rng.normal(0, 0.05, 3)))) for _ in range(6)
    ]
    both = [AUC, K3]
    assert is_beaten(scores(0.5, k3=[0.11]), complete, SEEDS, both, pruner) is not None
    assert is_beaten(scores(0.5, k3=[0.05]), complete, SEEDS, both, pruner) is None


def test_a_reward_that_fell_is_told_from_one_that_did_not_move():
    pruner = Pruner(collapse_alpha=0.001)
    rng = np.random.default_rng(4)
    flat = [{s: 0.4 + rng.normal(0, 0.05) for s in range(1, 61)} for _ in range(2000)]
    assert sum(has_collapsed(r, 80, pruner) is not None for r in flat) <= 8  # 2 expected
    fallen = {s: (0.4 if s < 20 else 0.1) + rng.normal(0, 0.05) for s in range(1, 61)}
    reason = has_collapsed(fallen, 80, pruner)
    assert reason is not None and reason.startswith("its reward fell from 0.") and reason.endswith("by step 60")
    assert has_collapsed({s: v for s, v in fallen.items() if s < 40}, 80, pruner) is None  # not half-way yet
    assert has_collapsed(fallen, 80, Pruner(collapse_alpha=0.0)) is None
    early = [fallen[s] for s in range(1, WINDOW + 1)]
    late = [fallen[s] for s in range(61 - WINDOW, 61)]
    assert scipy_stats.ttest_ind(early, late, equal_var=False, alternative="greater").pvalue < 0.001


def test_rank_among_the_cells_of_a_seed():
    pruner = Pruner(reward_quantile=0.1)
    peers = [0.5 + 0.01 * i for i in range(19)]
    low = dict.fromkeys(range(1, 41), 0.495)
    assert "rank 1 from below among 20 cells" in (is_among_lowest(low, 80, peers, pruner) or "")
    assert is_among_lowest(dict.fromkeys(range(1, 41), 0.505), 80, peers, pruner) is not None  # rank 2 of 20
    assert is_among_lowest(dict.fromkeys(range(1, 41), 0.515), 80, peers, pruner) is None
    assert is_among_lowest(low, 80, peers[:8], pruner) is None  # rank 1 of 9 is more than a tenth
    assert is_among_lowest(dict.fromkeys(range(1, 39), 0.0), 80, peers, pruner) is None  # not half-way
    assert is_among_lowest(low, 80, peers, Pruner()) is None
    assert reward_at({1: 1.0}, 40) is None


def test_share_of_exchangeable_cells_given_up():
    rng = np.random.default_rng(5)
    pruner = Pruner(reward_quantile=0.1)
    hits = 0
    for _ in range(2000):
        values = rng.normal(0.5, 0.1, 26)
        hits += is_among_lowest(dict.fromkeys(range(1, 41), values[0]), 80, list(values[1:]), pruner) is not None
    assert hits / 2000 == pytest.approx(2 / 26, abs=0.02)


def test_halving_keeps_the_best_half_of_the_trials_with_as_many_seeds():
    pruner = Pruner(halving=2)
    others = [scores(0.1), scores(0.2), scores(0.3, 0.9), {}]
    assert is_below_half(scores(0.25), others, SEEDS, AUC, pruner) is None  # second of four
    assert is_below_half(scores(0.15), others, SEEDS, AUC, pruner) == "its auc is number 3 of 4 after 1 seeds"
    assert is_below_half(scores(0.0, 0.9), others, SEEDS, AUC, pruner) == "its auc is number 2 of 2 after 2 seeds"
    assert is_below_half(scores(0.0, 0.9, 0.0), others, SEEDS, AUC, pruner) is None  # nothing left to save
    assert is_below_half(scores(0.0), [], SEEDS, AUC, pruner) is None
    assert is_below_half(scores(0.0), others, SEEDS, AUC, Pruner()) is None
