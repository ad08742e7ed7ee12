"""The statistics of the replay laboratory: debiased, covered by their intervals, exact where they must be."""

from __future__ import annotations

import numpy as np
import pytest

from harness.studies.replay.moments import Moments, compare, off_diagonal, reference, spread

DIM = 40
SCALE = np.sqrt(1 / np.arange(1, DIM + 1))


def batches(
    rng: np.random.Generator, bias: np.ndarray, size: int = 16, width: int = 48
) -> tuple[np.ndarray, np.ndarray]:
    """(q [S, D], r [R, D]) with a target of length 1; the pairs share most of their noise."""
    size, width = 16, 48
    shared, own = 0.6 * rng.normal(size=(width, DIM)) * SCALE, 0.3 * rng.normal(size=(size, DIM)) * SCALE
    r = target() + shared
    return target() + bias + shared[:size] + own, r


def target() -> np.ndarray:
    rng = np.random.default_rng(7)
    found = rng.normal(size=DIM)
    return found / np.linalg.norm(found)


def bias_of(length: float) -> np.ndarray:
    rng = np.random.default_rng(8)
    found = rng.normal(size=DIM)
    return length * found / np.linalg.norm(found)


def compared(q: np.ndarray, r: np.ndarray, rng: np.random.Generator, draws: int = 300) -> Moments:
    return compare(q, r, r @ r.T, rng, draws)


def test_the_debiased_square_is_unbiased_and_the_plain_one_is_not() -> None:
    rng = np.random.default_rng(0)
    plain, debiased = [], []
    for _ in range(400):
        q, r = batches(rng, bias_of(0.3))
        gram = (q - r[:16]) @ (q - r[:16]).T
        plain.append(gram.mean())
        debiased.append(off_diagonal(gram))
    error = np.std(debiased) / 20
    assert abs(np.mean(debiased) - 0.09) < 4 * error
    assert np.mean(plain) - 0.09 > 4 * error


def test_spread_is_the_trace_of_the_covariance() -> None:
    x = np.random.default_rng(1).normal(size=(9, 5))
    assert spread(x @ x.T) == pytest.approx(np.trace(np.cov(x.T)))


@pytest.mark.parametrize("length", [0.0, 0.1, 0.3, 1.0])
def test_intervals_cover_the_truth(length: float) -> None:
    """95 % intervals over 200 experiments: bias, gain and cosine at no, small and large bias."""
    rng, bias = np.random.default_rng(2), bias_of(length)
    gain = 1 + bias @ target()
    truth = {"bias": length, "gain": gain, "cosine": gain / np.linalg.norm(target() + bias)}
    hits = dict.fromkeys(truth, 0)
    for _ in range(200):
        found = compared(*batches(rng, bias), rng)
        for name, value in truth.items():
            interval = getattr(found, name)
            hits[name] += interval.low - 1e-9 <= value <= interval.high + 1e-9
    assert all(count >= 184 for count in hits.values()), hits


def test_p_is_uniform_without_a_bias_and_small_with_one() -> None:
    rng = np.random.default_rng(3)
    without = [compared(*batches(rng, bias_of(0.0)), rng).p_zero for _ in range(200)]
    assert 2 <= sum(p < 0.05 for p in without) <= 20
    assert 70 <= sum(p < 0.5 for p in without) <= 130
    assert compared(*batches(rng, bias_of(0.5)), rng, 2000).p_zero < 0.01


def test_the_floor_is_what_no_bias_shows() -> None:
    rng = np.random.default_rng(4)
    found = [compared(*batches(rng, bias_of(0.0)), rng) for _ in range(200)]
    assert 0.88 <= np.mean([one.bias.value <= one.bias_floor for one in found]) <= 1.0


def test_equal_batches_have_no_bias_and_no_interval() -> None:
    rng = np.random.default_rng(5)
    _, r = batches(rng, bias_of(0.0))
    same = compared(r[:16], r, rng)
    assert (same.bias.value, same.bias.high, same.bias_floor, same.variance_ratio) == (0.0, 0.0, 0.0, 1.0)
    assert same.cosine.value == same.gain.value == 1.0
    twice = compared(2 * r[:16], r, rng)
    assert twice.gain.value == pytest.approx(2.0, abs=0.15)
    assert twice.bias.value == pytest.approx(1.0, abs=0.15)
    assert twice.cosine.value > 0.99
    assert twice.variance_ratio == pytest.approx(4.0)


def test_a_reference_that_is_noise_is_refused() -> None:
    r = np.array([[1.0, 0.0], [-1.0, 0.1], [1.0, 0.0], [-1.0, -0.1]])
    with pytest.raises(ValueError, match="take more"):
        compared(r, r, np.random.default_rng(0))


def test_the_reference_says_how_well_it_is_known() -> None:
    rng = np.random.default_rng(6)
    found = []
    for _ in range(100):
        _, r = batches(rng, bias_of(0.0))
        found.append(reference(r @ r.T))
    assert np.mean([one.norm for one in found]) == pytest.approx(1.0, abs=0.02)
    assert np.mean([one.norm_error for one in found]) == pytest.approx(np.std([one.norm for one in found]), rel=0.3)
    assert np.mean([one.variance for one in found]) == pytest.approx(0.36 * np.sum(SCALE**2), rel=0.1)
    # two halves of 24 batches each differ by sqrt(tr Cov (1/24 + 1/24))
    assert np.mean([one.half_distance**2 for one in found]) == pytest.approx(0.36 * np.sum(SCALE**2) / 12, rel=0.1)
