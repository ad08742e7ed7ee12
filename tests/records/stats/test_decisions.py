"""Verdict kinds, moderated variances, replicated controls and collapse rates, against hand, scipy and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special
from scipy import stats as scipy_stats

from harness.records import stats
from harness.records.stats.moderation import inverse_trigamma


def of(d: list[float], can_pool: bool = True) -> stats.Contrast:
    """A contrast over units with these differences."""
    variance = float(np.var(d, ddof=1)) if len(d) > 1 else math.nan
    return stats.Contrast(
        mean=float(np.mean(d)), variance=variance, num_units=len(d), df=max(len(d) - 1, 0), can_pool=can_pool
    )


def run(value: float, start: float = 0.4, end: float | None = None, has_moved: bool = True) -> stats.Outcome:
    return stats.Outcome(value=value, start=start, end=value if end is None else end, has_moved=has_moved)


def runs(*values: float, start: float = 0.4) -> dict[stats.Key, stats.Outcome]:
    return {(base, base): run(value, start) for base, value in enumerate(values)}


@pytest.mark.parametrize("y", [1e-3, 0.3, 1.0, 7.0, 900.0, 1e17])
def test_inverse_trigamma(y: float) -> None:
    assert inverse_trigamma(float(special.polygamma(1, y))) == pytest.approx(y, rel=1e-9)


def test_the_prior_is_found_again() -> None:
    """Independent variances drawn from a scaled inverse chi-square with 6 degrees of freedom and variance 0.0009."""
    rng = np.random.default_rng(0)
    true = 6 * 0.0009 / rng.chisquare(6, 20000)
    df = np.full(20000, 3.0)
    prior = stats.fit_prior(true * rng.chisquare(3, 20000) / 3, df, correlation=0.0)
    assert prior.df == pytest.approx(6, rel=0.05) and prior.variance == pytest.approx(0.0009, rel=0.03)


def test_equal_variances_have_an_infinite_prior_and_its_limit() -> None:
    variances, df = np.full(5, 0.01), np.full(5, 2.0)
    prior = stats.fit_prior(variances, df)
    assert math.isinf(prior.df) and prior.limit == pytest.approx(10 / (1 + 4 * 0.49))
    # log(0.01) - digamma(1) + log(1), and digamma(1) is minus Euler's constant
    assert prior.variance == pytest.approx(0.01 * math.exp(np.euler_gamma))
    posterior, total = stats.moderated(variances, df, prior)
    assert posterior == pytest.approx(prior.variance) and total == pytest.approx(prior.limit)


def test_moderated_by_hand() -> None:
    prior = stats.Prior(df=4.0, variance=0.01, limit=5.0)
    posterior, total = stats.moderated(np.array([0.004, 1.0]), np.array([2.0, 2.0]), prior)
    assert posterior[0] == pytest.approx((4 * 0.01 + 2 * 0.004) / 6) and total[0] == 5.0  # 6, limited
    assert (posterior[1], total[1]) == (1.0, 2.0)  # a hundred times the prior: its own


def test_three_arms_or_none_with_spread_have_no_prior() -> None:
    assert stats.fit_prior(np.full(3, 0.01), np.full(3, 2.0)).df == 0
    assert stats.fit_prior(np.zeros(9), np.full(9, 2.0)).df == 0


def test_one_arm_alone_is_the_t_test_at_the_level_of_the_rule() -> None:
    d = [0.05, 0.06, 0.08, 0.04]
    (found,) = stats.decide([of(d)])
    expected = scipy_stats.ttest_1samp(d, 0.0)
    interval = expected.confidence_interval(1 - stats.ALPHA)
    assert found.verdict == "better" and found.p == pytest.approx(expected.pvalue) and found.df == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p_equal > 0.9


def test_the_interval_is_the_decision() -> None:
    """Over random settings: decided exactly where the printed interval leaves 0 or stays within delta."""
    rng = np.random.default_rng(1)
    kinds = set[str]()
    for _ in range(200):
        size = int(rng.integers(1, 15))
        family = [of(list(rng.normal(rng.choice([0, 0.03, -0.2]), rng.choice([0.005, 0.05]), 4))) for _ in range(size)]
        for contrast, found in zip(family, stats.decide(family), strict=True):
            assert found.low <= contrast.mean <= found.high and 1 - stats.ALPHA <= found.level < 1
            inside, away = found.low > -stats.DELTA and found.high < stats.DELTA, found.low > 0 or found.high < 0
            assert (found.verdict != "cannot tell") == (inside or away) == (found.p_adjusted <= stats.ALPHA)
            assert found.verdict != "equal" or inside
            assert found.verdict not in ("better", "worse") or (away and (found.verdict == "better") == (found.low > 0))
            kinds.add(found.verdict)
    assert kinds == {"better", "equal", "worse", "cannot tell"}


def test_equal_is_corrected_for_the_number_of_arms() -> None:
    """Ten arms of which one is equal by itself and the others are too noisy to say anything."""
    close = [0.011, -0.009, 0.008, -0.012, 0.004]
    alone = stats.decide([of(close)])[0]
    rng = np.random.default_rng(0)
    noisy = [of(list(rng.normal(0, 0.5, 5)), can_pool=False) for _ in range(40)]
    among = stats.decide([of(close, can_pool=False), *noisy])[0]
    assert alone.verdict == "equal" and among.verdict == "cannot tell" and among.level > alone.level
    sides = ((-stats.DELTA, "greater"), (stats.DELTA, "less"))
    p_equal = max(
        scipy_stats.ttest_1samp(close, bound, alternative=side).pvalue  # pyright: ignore[reportAttributeAccessIssue]
        for bound, side in sides
    )
    assert alone.p_equal == among.p_equal == pytest.approx(p_equal)


def test_without_a_variance_there_is_no_verdict_and_no_place_in_the_family() -> None:
    one, other = stats.decide([of([-0.5]), of([-0.5, -0.5, -0.51, -0.52])])
    assert one.verdict == "cannot tell" and math.isnan(one.low) and math.isnan(one.p_adjusted)
    assert other.verdict == "worse" and other.level == pytest.approx(1 - stats.ALPHA)
    assert stats.decide([]) == []


@pytest.mark.parametrize("d", [[0.0, 0.0], [-0.25] * 3, [0.7 - 0.6, 0.4 - 0.3], [0.01] * 9])
def test_units_that_do_not_differ_decide_nothing(d: list[float]) -> None:
    """Not even up to rounding: 0.7 - 0.6 and 0.4 - 0.3 are a bit apart."""
    alone, other = stats.decide([of(d), of([-0.1, -0.11])])
    assert (alone.verdict, alone.df) == ("cannot tell", 0)
    assert all(math.isnan(x) for x in (alone.low, alone.high, alone.p, alone.p_equal, alone.p_adjusted, alone.sd))
    assert other == stats.decide([of([-0.1, -0.11])])[0]  # it is no part of the family
    (judged,) = stats.judge([(runs(*(0.5 + x for x in d)), runs(*[0.5] * len(d)))])
    assert judged.verdict == "cannot tell"


def test_units_that_do_not_differ_are_decided_by_the_spread_of_other_arms() -> None:
    rng = np.random.default_rng(0)
    found = stats.decide([of([-0.25] * 3), *(of(rng.normal(0, 0.01, 3).tolist()) for _ in range(7))])
    assert found[0].verdict == "worse" and found[0].low < -0.25 - 1e-3 < -0.25 + 1e-3 < found[0].high < 0


@pytest.mark.parametrize(("count", "total"), [(0, 3), (1, 3), (2, 5), (5, 5), (30, 80)])
def test_rates_are_clopper_and_pearsons(count: int, total: int) -> None:
    found = stats.rate(count, total)
    if 0 < count < total:
        want = scipy_stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        assert (found.low, found.high) == pytest.approx((want.low, want.high))
    else:
        bound = 0.05 ** (1 / total)  # none of n: (1 - rate)^n = 5 %
        assert (found.low, found.high) == pytest.approx((0, 1 - bound) if count == 0 else (bound, 1))


def test_rates_in_words() -> None:
    assert str(stats.rate(0, 3)) == "0 of 3: at most 63 %" and str(stats.rate(3, 3)) == "3 of 3: at least 37 %"
    assert str(stats.rate(1, 3)) == "1 of 3: 1 to 91 %" and str(stats.rate(0, 0)) == "-"
    with pytest.raises(ValueError, match="count=4 of total=3"):
        stats.rate(4, 3)


def test_what_is_a_collapse() -> None:
    assert stats.is_collapsed(0.4, 0.19) and not stats.is_collapsed(0.4, 0.2)
    assert not stats.is_collapsed(0.04, 0.0) and not stats.is_collapsed(math.nan, 0.0)
    assert stats.is_collapsed(math.nan, 0.5, has_diverged=True)


def test_a_bimodal_arm_is_a_rate_and_a_verdict_on_the_others() -> None:
    control = runs(0.70, 0.72, 0.69, 0.71, 0.70)
    (found,) = stats.judge([(runs(0.50, 0.53, 0.01, 0.51, 0.50), control)])
    assert found.verdict == "collapses in 1 of 5, else worse" and str(found.rate) == "1 of 5: 1 to 72 %"
    assert found.contrast is not None and not found.contrast.can_pool
    assert found.contrast.mean == pytest.approx(np.mean([-0.20, -0.19, -0.20, -0.20]))
    assert stats.kind(found.verdict) == stats.COLLAPSES and stats.is_decided(found.verdict)
    (all_of_them,) = stats.judge([(runs(0.01, 0.02, 0.01, 0.0, 0.0), control)])
    assert all_of_them.verdict == "worse" and all_of_them.rate.count == 5


def test_a_collapsed_control_run_says_nothing_about_the_arm() -> None:
    control = runs(0.70, 0.02, 0.72, 0.69)
    (found,) = stats.judge([(runs(0.71, 0.70, 0.73, 0.701), control)])
    assert found.contrast is not None and found.contrast.num_units == 3
    assert found.verdict == "equal" and found.rate.count == 0


def test_no_signal() -> None:
    frozen = {key: run(0.4, has_moved=False) for key in runs(0, 0, 0)}
    learned, dead = runs(0.6, 0.7, 0.65), {key: run(0.0, start=0.4) for key in runs(0, 0, 0)}
    assert [found.verdict for found in stats.judge([(frozen, learned), (learned, frozen), (dead, dead)])] == (
        [stats.NO_SIGNAL] * 3
    )
    one_moved = frozen | {(2, 2): run(0.41)}
    found = stats.judge([(one_moved, learned), (dead, learned)])
    assert [one.verdict for one in found] == ["worse", "worse"]
    assert not stats.is_decided(stats.NO_SIGNAL) and not stats.is_decided("cannot tell")


def test_the_control_of_a_base_is_the_mean_of_its_replicates() -> None:
    arm = {(0, 0): 0.5, (1, 1): 0.6}
    control = {(0, 0): 0.9, (0, 5): 0.7, (0, 6): 0.5, (1, 1): 0.8, (1, 7): 0.6, (2, 2): 0.1}
    found = stats.contrast(arm, control)
    assert (found.num_units, found.df) == (2, 1)
    assert found.mean == pytest.approx((-0.2 - 0.1) / 2) and found.variance == pytest.approx(0.005)


def test_seeds_tied_to_bases_and_seeds_of_one_base_are_pairs() -> None:
    arm, control = {(0, 0): 0.5, (1, 1): 0.6, (2, 2): 0.4}, {(0, 0): 0.6, (1, 1): 0.8, (2, 2): 0.7}
    tied = stats.contrast(arm, control)
    one_base = stats.contrast({(0, s): v for (_, s), v in arm.items()}, {(0, s): v for (_, s), v in control.items()})
    assert tied == one_base and (tied.mean, tied.variance) == (pytest.approx(-0.2), pytest.approx(0.01))
    assert (tied.num_units, tied.df) == (3, 2)
    assert stats.contrast(arm, {(7, 7): 0.5}).num_units == 0


def test_crossed_seeds_are_crossed_random_effects() -> None:
    rng = np.random.default_rng(2)
    a, c = rng.normal(0.6, 0.05, (3, 4)), rng.normal(0.6, 0.05, (3, 4))
    index = [(b, s) for b in range(3) for s in range(4)]
    found = stats.contrast({k: a[k] for k in index}, {k: c[k] for k in index})
    want = stats.crossed(a, c)
    half = scipy_stats.t.ppf(0.975, math.floor(found.df)) * math.sqrt(found.variance / found.num_units)
    assert found.mean == pytest.approx(want.mean) and math.floor(found.df) == want.df
    assert (found.mean - half, found.mean + half) == pytest.approx((want.low, want.high))


def test_an_arm_whose_mean_squares_nearly_cancel_gets_its_verdict() -> None:
    """Satterthwaite's degrees of freedom of the last arm are (1.21 - 1)^2 / (1.21^2 + 1) = 0.018; 1 is the least."""
    control = {(base, seed): 0.0 for base in range(2) for seed in range(2)}

    def arm(row: float, column: float, rest: float) -> dict[stats.Key, float]:
        signs = [(key, (-1) ** key[0], (-1) ** key[1]) for key in control]
        return {key: -0.5 + 0.01 * (row * a + column * b + rest * a * b) for key, a, b in signs}

    others = [stats.contrast(arm(1.0 + 0.1 * k, 0.5, 1.0), control) for k in range(7)]
    odd = stats.contrast(arm(0.0, 1.1, 1.0), control)
    assert odd.df == 1 and odd.variance == pytest.approx(2 * 4e-4 * (1.21 - 1) / 4)
    assert [found.verdict for found in stats.decide([*others, odd])] == ["worse"] * 8


def test_components_are_found_again() -> None:
    """300 bases, 4 arms with 3 replicates: base 0.05, run 0.03, and answers of 128 questions."""
    rng = np.random.default_rng(3)
    bases, arms, answers = rng.normal(0.5, 0.05, 300), dict[str, dict[stats.Key, float]](), dict[str, np.ndarray]()
    for name in "abcd":
        chance = (bases[:, None] + rng.normal(0, 0.03, (300, 3))).reshape(-1, 1)
        answers[name] = (rng.random((900, 128)) < chance).astype(float)
        values = answers[name].mean(axis=1).reshape(300, 3)
        arms[name] = {(b, s): float(values[b, s]) for b in range(300) for s in range(3)}
    found = stats.components(arms, answers)
    assert found.has_replicates and found.base == pytest.approx(0.05, rel=0.1)
    assert found.run == pytest.approx(0.03, rel=0.1) and found.evaluation == pytest.approx(0.5 / 128**0.5, rel=0.02)
    alone = stats.components(
        {n: {k: v for k, v in values.items() if k[1] == 0} for n, values in arms.items()},
        {n: x[::3] for n, x in answers.items()},
    )
    assert not alone.has_replicates and alone.run == pytest.approx(0.03, rel=0.15)
    nothing = stats.components({}, {})
    assert math.isnan(nothing.base) and math.isnan(nothing.run) and math.isnan(nothing.evaluation)


def test_outcomes_need_an_evaluation() -> None:
    assert stats.outcome([0.5, 0.7], 0.4) == stats.Outcome(value=0.6, start=0.4, end=0.7, has_moved=True)
    assert stats.outcome([0.4], 0.4).has_moved and not stats.outcome([0.4, 0.4], 0.4, is_frozen=True).has_moved
    with pytest.raises(ValueError, match="curve="):
        stats.outcome([], 0.4)
