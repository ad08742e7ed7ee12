"""avg@k, pass@k and maj@k against brute force over samples, and intervals against scipy and simulation."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.stats

from harness.records.sample_scores import (
    avg_at_k,
    classes_of,
    maj_at_k,
    over_questions,
    over_seeds,
    pass_at_k,
    question_scores,
    scores_of,
)


def matrix(seed: int, questions: int = 7, k: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((questions, k)) < rng.random((questions, 1))).astype(int)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(seed: int, k: int) -> None:
    correct = matrix(seed)
    brute = [np.mean([max(some) for some in itertools.combinations(row, k)]) for row in correct]
    np.testing.assert_allclose(pass_at_k(correct, k), brute, atol=1e-12)


def test_avg_is_pass_at_1_and_all_samples_decide_pass_at_k() -> None:
    correct = matrix(9)
    np.testing.assert_allclose(avg_at_k(correct), pass_at_k(correct, 1), atol=1e-12)
    np.testing.assert_array_equal(pass_at_k(correct, 6), correct.max(1))


@pytest.mark.parametrize("k", [0, 7])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}: must be 1 to 6"):
        pass_at_k(matrix(0), k)


def brute_majority(answers: list[str | None], right: str) -> float:
    """Expectation over a fair choice among the most frequent answers."""
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return float(np.mean([answer == right for answer in winners])) if winners else 0.0


@pytest.mark.parametrize("seed", range(5))
def test_majority_votes_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    told = [[(None, "1", "2", "3")[i] for i in rng.integers(0, 4, 5)] for _ in range(40)]
    correct = np.array([[answer == "2" for answer in row] for row in told]).astype(int)
    classes = [classes_of(row) for row in told]
    found = maj_at_k(correct, classes)
    np.testing.assert_allclose(found, [brute_majority(row, "2") for row in told])
    assert {0.0, 0.5, 1.0} <= set(found)  # ties occur


def test_scores_of_a_worked_example() -> None:
    """Two questions, four samples: 3 of 4 right, then 1 of 4 right against two equal wrong ones."""
    matrices = {
        "correct": [[1, 1, 0, 1], [0, 1, 0, 0]],
        "answers": [[0, 0, 1, 0], [0, 1, 0, -1]],
        "greedy": [1, 0],
    }
    assert scores_of(matrices) == pytest.approx(
        {"avg@4": 0.5, "pass@1": 0.5, "pass@2": (1 + 0.5) / 2, "pass@4": 1.0, "maj@4": 0.5, "greedy": 0.5}
    )
    assert list(question_scores({"greedy": [1]})) == ["greedy"]
    assert list(question_scores({"correct": [[1]], "answers": [[0]]})) == ["avg@1"]


def test_the_interval_over_questions_is_wilsons_with_students_quantile() -> None:
    right = np.array([1.0] * 9 + [0.0] * 31)
    t = scipy.stats.t.ppf(0.975, 39)
    z = t * np.sqrt(40 / 39)  # the variance over questions divides by 39
    found = over_questions(right)
    level = 1 - 2 * scipy.stats.norm.sf(z)
    wilson = scipy.stats.binomtest(9, 40).proportion_ci(confidence_level=level, method="wilson")
    assert (found.mean, found.low, found.high) == pytest.approx((9 / 40, wilson.low, wilson.high))
    assert np.isnan(over_questions(np.array([1.0])).low)


def test_scores_that_are_all_equal_leave_more_than_their_value_possible() -> None:
    none, all_ = over_questions(np.zeros(8)), over_questions(np.ones(8))
    assert (none.low, all_.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - all_.low) == pytest.approx(0.411, abs=1e-3)
    assert over_seeds(np.zeros((3, 8))) == none


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("a", "b"), [(0.3, 2.7), (0.1, 3.9), (2.0, 2.0)])
def test_the_interval_over_questions_covers_where_few_answers_are_right(k: int, a: float, b: float) -> None:
    """Questions of beta-distributed difficulty, 30 of them: Student's own interval misses a rare success too often."""
    rng = np.random.default_rng(1)
    scores = rng.binomial(k, rng.beta(a, b, (600, 30))[..., None], (600, 30, 1))[..., 0] / k
    truth, t = a / (a + b), scipy.stats.t.ppf(0.975, 29)
    found = [over_questions(row) for row in scores]
    held = np.mean([one.low <= truth <= one.high for one in found])
    half = t * scores.std(1, ddof=1) / np.sqrt(30)
    student = np.mean(abs(scores.mean(1) - truth) <= half)
    assert held >= 0.93 and (a > 0.1 or student < held - 0.04)


def test_the_interval_over_seeds_covers_as_often_as_it_says() -> None:
    """Crossed effects of known size on a logit: the share of 400 intervals that hold the mean is near 95 %."""
    rng = np.random.default_rng(0)
    spread = rng.normal(0, 0.5, 200_000) + rng.normal(0, 1.0, 200_000) + rng.normal(0, 0.6, 200_000)
    truth = float(np.mean(1 / (1 + np.exp(1 - spread))))
    hits = 0
    for _ in range(400):
        logits = rng.normal(0, 0.5, (4, 1)) + rng.normal(0, 1.0, (1, 40)) + rng.normal(0, 0.6, (4, 40))
        found = over_seeds(1 / (1 + np.exp(1 - logits)))
        hits += found.low <= truth <= found.high
    assert 0.92 <= hits / 400 <= 0.99
    one = rng.random((1, 20))
    assert over_seeds(one) == over_questions(one[0])
    alone = over_seeds(np.array([[1.0], [0.0]]))
    assert alone.mean == 0.5 and np.isnan([alone.low, alone.high]).all()
