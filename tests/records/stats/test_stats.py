"""Statistics against scipy, closed forms and simulation."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.records import stats


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11, 40])
def test_iqm_is_the_quarter_trimmed_mean(size: int) -> None:
    values = np.random.default_rng(size).standard_normal((3, size))
    inner = np.sort(values)[:, size // 4 : size - size // 4]
    np.testing.assert_allclose(stats.iqm(values), inner.mean(axis=1), rtol=1e-12)


def test_iqm_by_hand() -> None:
    assert stats.iqm(np.array([100.0, 1.0, 2.0, -50.0, 3.0])) == 2.0
    assert stats.iqm(np.array([0.0, 9.0, 3.0])) == 4.0  # three values: nothing to trim


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_paired_is_scipys_paired_t_test(size: int) -> None:
    rng = np.random.default_rng(size)
    a, b = rng.normal(0.8, 0.02, size), rng.normal(0.75, 0.02, size)
    keys = [(0, seed) for seed in range(size)]
    found = stats.paired(dict(zip(keys, a, strict=True)), dict(zip(reversed(keys), b[::-1], strict=True)))
    expected = scipy_stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert found.num_pairs == size
    assert found.mean == pytest.approx(np.mean(a - b))
    assert found.sd == pytest.approx(np.std(a - b, ddof=1))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)


def test_paired_uses_common_seeds_only() -> None:
    found = stats.paired({1: 0.9, 2: 0.8, 3: 0.1}, {2: 0.5, 1: 0.4, 4: 0.0})
    assert (found.num_pairs, found.p) == (2, pytest.approx(scipy_stats.ttest_rel([0.9, 0.8], [0.4, 0.5]).pvalue))
    assert found.mean == pytest.approx(0.4)


def test_paired_without_enough_pairs() -> None:
    none, one = stats.paired({1: 0.9}, {2: 0.5}), stats.paired({1: 0.9}, {1: 0.5})
    assert none.num_pairs == 0 and math.isnan(none.mean)
    assert one.num_pairs == 1 and one.mean == pytest.approx(0.4) and math.isnan(one.low)
    assert stats.verdict(one.low, one.high) == "cannot tell"


@pytest.mark.parametrize(("arm", "mean"), [((0.5, 0.5), 0.0), ((0.75, 0.75), 0.25), ((0.9, 0.5 + 0.4), 0.4)])
def test_equal_differences_have_no_interval_and_no_verdict(arm: tuple[float, ...], mean: float) -> None:
    found = stats.paired(dict(enumerate(arm)), {0: 0.5, 1: 0.5})
    assert (found.num_pairs, found.mean, found.sd) == (2, pytest.approx(mean), pytest.approx(0, abs=1e-15))
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)
    assert stats.verdict(found.low, found.high) == stats.verdict(mean, mean) == "cannot tell"


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_sign_flip_is_scipys_exact_permutation_test(size: int) -> None:
    d = np.random.default_rng(size).normal(0.3, 1, size)
    assert stats.sign_flip_p(d) >= 2.0 ** (1 - size)
    if size > 1:
        expected = scipy_stats.permutation_test(
            (d,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", n_resamples=10_000, vectorized=True
        )
        assert stats.sign_flip_p(d) == pytest.approx(expected.pvalue)


def test_sign_flip_extremes() -> None:
    assert stats.sign_flip_p(np.array([0.1, 0.2, 0.3])) == 0.25
    assert stats.sign_flip_p(np.array([1.0, -1.0])) == 1.0
    assert math.isnan(stats.sign_flip_p(np.ones(stats.MAX_EXACT + 1)))


def test_sign_test_by_hand() -> None:
    assert stats.sign_test_p([-0.01] * 11 + [-0.5]) == pytest.approx(2 / 4096)
    assert stats.sign_test_p([-0.01] * 10 + [0.5] * 2) == pytest.approx(2 * (1 + 12 + 66) / 4096)
    assert stats.sign_test_p([-0.1, 0.0, 0.1]) == stats.sign_test_p([]) == stats.sign_test_p([0.0]) == 1.0


def test_sign_test_holds_its_level_over_arms_that_share_a_control_with_tails() -> None:
    """20 arms without an effect on 12 bases: each loses or gains by Cauchy draws, and all share the control's noise."""
    draw, wrong, worlds = np.random.default_rng(0), 0, 600
    for _ in range(worlds):
        gaps = 0.01 * draw.standard_cauchy((20, 12)) + 0.003 * draw.normal(size=12)
        wrong += min(stats.sign_test_p(list(gap)) for gap in gaps) * 20 <= 0.05
    assert wrong / worlds <= 0.05


def test_holm_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = stats.holm([0.6, math.nan, 0.5])
    assert adjusted[0] == adjusted[2] == 1.0 and math.isnan(adjusted[1])
    assert stats.holm([]) == []


def test_false_discovery_is_the_least_level_that_rejects() -> None:
    """The definition of Benjamini and Hochberg, by brute force; NaN is no test."""
    p = [0.0001, 0.0459, 0.0004, math.nan, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.3240, 0.4262, 1.0]
    tests = sorted(x for x in p if not math.isnan(x))
    found, level = stats.step_up(p, 0.05)
    for x, adjusted in zip(p, found, strict=True):
        if math.isnan(x):
            assert math.isnan(adjusted)
        else:
            assert adjusted == pytest.approx(min(q * 12 / (i + 1) for i, q in enumerate(tests) if q >= x))
    assert level == pytest.approx(1 - 0.05 * 5 / 12), "five of twelve are at most 0.05"
    nothing, level = stats.step_up([], 0.05)
    assert len(nothing) == 0 and level == 0.95


def test_holm_controls_the_family() -> None:
    """Six true null hypotheses: at least one false alarm in about 5 % of the families, against 26 % uncorrected."""
    p = np.random.default_rng(0).random((4000, 6))
    alarms = np.mean([min(stats.holm(list(row))) < 0.05 for row in p])
    assert 0.04 < alarms < 0.06
    assert 0.24 < np.mean(p.min(axis=1) < 0.05) < 0.29


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.09, "better"),
        (-0.2, -0.1, "worse"),
        (-0.02, 0.02, "equal"),
        (0.005, 0.02, "equal"),  # real but too small to matter
        (-0.02, 0.04, "cannot tell"),
        (-0.03, 0.02, "cannot tell"),  # on the border is not inside
        (math.nan, math.nan, "cannot tell"),
    ],
)
def test_verdict(low: float, high: float, expected: str) -> None:
    assert stats.verdict(low, high) == expected


def test_bootstrap_width_without_question_noise_is_the_t_interval() -> None:
    """Seeds alone, many of them, nearly normal: the interval is Student's."""
    values = np.random.default_rng(1).normal(0.5, 0.05, 30)
    low, high = stats.bootstrap(values[:, None], stats.resample(30, 1, np.random.default_rng(2), 20_000))
    expected = scipy_stats.t.interval(0.95, 29, values.mean(), scipy_stats.sem(values))
    assert (low, high) == pytest.approx(expected, abs=0.002)


def test_bootstrap_is_reproducible_and_inside_the_unit_interval() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    first = stats.bootstrap(scores, stats.resample(2, 3, np.random.default_rng(5)))
    assert first == stats.bootstrap(scores, stats.resample(2, 3, np.random.default_rng(5)))
    assert 0 <= first[0] < first[1] <= 1
    assert stats.bootstrap(scores[:1], stats.resample(1, 3, np.random.default_rng(5))) == (0.0, 1.0)


def test_resamples() -> None:
    draws = stats.resample(4, 50, np.random.default_rng(0), 2000)
    assert set(np.unique(draws.seeds)) == {0, 1, 2, 3}
    np.testing.assert_allclose(draws.questions.sum(axis=1), 1)
    np.testing.assert_allclose(draws.questions.var(axis=0).mean(), (1 - 1 / 50) / 50**2, rtol=0.05)


def p_of(values: np.ndarray, mean: float, alternative: Literal["two-sided", "less", "greater"] = "two-sided") -> float:
    return float(scipy_stats.ttest_1samp(values, mean, alternative=alternative).pvalue)  # pyright: ignore[reportAttributeAccessIssue]


def two_way(size: int, num_questions: int, seed: int, sd_seeds: float, sd_questions: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 1, (size, num_questions))
    return 0.3 + rng.normal(0, sd_seeds, (size, 1)) + rng.normal(0, sd_questions, num_questions) + noise


def test_crossed_is_the_paired_t_test_where_questions_do_not_differ() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(0.02, 0.03, (5, 1)) + np.zeros((5, 40))
    found, want = stats.crossed(d, np.zeros_like(d)), scipy_stats.ttest_1samp(d[:, 0], 0)
    interval = want.confidence_interval()
    assert (found.p, found.df) == (pytest.approx(p_of(d[:, 0], 0)), 4)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_crossed_is_the_t_test_over_questions_where_seeds_are_equal() -> None:
    d = np.random.default_rng(0).normal(0.02, 0.3, (1, 30)) + np.zeros((4, 1))
    found = stats.crossed(d, 0 * d)
    assert found.p == pytest.approx(p_of(d[0], 0)) and found.df == 29


def test_crossed_mean_squares_are_those_of_least_squares() -> None:
    """The table of variance from three regressions on dummy variables, and the interval from it by scipy's t."""
    d = two_way(4, 12, 3, 0.5, 0.8)
    rows, columns = np.kron(np.eye(4), np.ones((12, 1))), np.kron(np.ones((4, 1)), np.eye(12))

    def rss(design: np.ndarray) -> float:
        fit = np.linalg.lstsq(design, d.ravel(), rcond=None)[0]
        return float(np.sum((d.ravel() - design @ fit) ** 2))

    full = rss(np.hstack([rows, columns]))
    ms = (rss(columns) - full) / 3, (rss(rows) - full) / 11, full / 33
    total = ms[0] + ms[1] - ms[2]
    df = math.floor(total**2 / (ms[0] ** 2 / 3 + ms[1] ** 2 / 11 + ms[2] ** 2 / 33))
    want = scipy_stats.t.interval(0.95, df, d.mean(), math.sqrt(total / d.size))
    found = stats.crossed(d, np.zeros_like(d))
    assert found.df == df and (found.low, found.high) == pytest.approx(want)
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(abs(d.mean()) / math.sqrt(total / d.size), df))


def test_crossed_needs_two_of_each() -> None:
    one = stats.crossed(np.ones((1, 5)), np.zeros((1, 5)))
    assert one.mean == 1.0 and math.isnan(one.low) and math.isnan(one.p)
    assert math.isnan(stats.crossed(np.ones((5, 1)), np.zeros((5, 1))).low)
    for other in (0.0, 1.0):
        same = stats.crossed(np.ones((3, 5)), np.full((3, 5), other))
        assert same.mean == 1 - other and math.isnan(same.low) and math.isnan(same.high) and math.isnan(same.p)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (3, 3), (9, 2), (40, 70), (700, 820)])
def test_mcnemar_is_the_exact_binomial_test(wins: int, losses: int) -> None:
    size = wins + losses + 5
    arm, control = np.ones((1, size)), np.ones((1, size))
    control[0, :wins], arm[0, wins : wins + losses] = 0, 0
    found = stats.mcnemar(arm, control)
    want = scipy_stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert (found.wins, found.losses) == (wins, losses)
    assert found.p == pytest.approx(want, rel=1e-9)


def test_mcnemar_has_the_smallest_p_values() -> None:
    """By `2 * sum(comb(1151, k), k to 28) / 2^1151`; scipy's own p is 0 here."""
    arm = np.concatenate([np.ones(1123), np.zeros(28)])[None]
    assert stats.mcnemar(arm, 1 - arm).p == pytest.approx(8.102933935041766e-291, rel=1e-12)


def test_mcnemar_adds_the_seeds() -> None:
    arm = np.array([[1.0, 1, 1, 0, 1], [1, 1, 0, 1, 1]])
    found = stats.mcnemar(arm, np.array([[0.0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]))
    assert (found.wins, found.losses) == (5, 1)
    assert found.p == pytest.approx(2 * (1 + 6) / 64)


@pytest.mark.parametrize("size", [3, 5, 9])
def test_the_verdict_equal_is_two_one_sided_t_tests(size: int) -> None:
    rng = np.random.default_rng(size)
    seen = set()
    for _ in range(60):
        d = rng.normal(rng.normal(0, 0.01), 0.012, size)
        found = stats.paired(dict(enumerate(d)), dict.fromkeys(range(size), 0.0))
        sides = [
            p_of(d, -stats.DELTA, "greater"),
            p_of(d, stats.DELTA, "less"),
        ]
        is_equal = stats.verdict(found.low, found.high) == "equal"
        assert is_equal == (max(sides) < 0.025)
        seen.add(is_equal)
    assert seen == {True, False}


def test_the_interval_of_clusters_of_one_is_students() -> None:
    values = np.random.default_rng(1).standard_normal(9)
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert stats.mean_interval(values, [str(i) for i in range(9)], 0.9) == pytest.approx(tuple(expected))


def test_copies_within_a_cluster_add_no_certainty() -> None:
    values = np.random.default_rng(2).standard_normal(6)
    names = [str(i) for i in range(6)]
    once = stats.mean_interval(values, names)
    assert stats.mean_interval(np.repeat(values, 5), list(np.repeat(names, 5))) == pytest.approx(once)
    apart = stats.mean_interval(np.repeat(values, 5), [str(i) for i in range(30)])
    assert apart[1] - apart[0] < (once[1] - once[0]) / 2, "as many clusters as values would"
    assert all(math.isnan(end) for end in stats.mean_interval(values, ["a", "b"] * 3))


def test_percentiles_of_draws_with_infinite_ones() -> None:
    """The sixth and the 196th of 200 draws; infinite ones are the largest, and NaN is no draw."""
    draws = np.concatenate([np.arange(190.0), np.full(10, math.inf), np.full(7, math.nan)])
    assert stats.percentiles(draws[::-1]) == (5.0, math.inf)
    assert stats.percentiles(np.array([3.0])) == (3.0, 3.0)
    assert all(math.isnan(end) for end in stats.percentiles(np.array([math.nan])))
