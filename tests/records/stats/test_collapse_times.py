"""Steps at which runs collapse, and the log-rank test of paired runs: by hand, by scipy, on bases that fall as one."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import CensoredData, logrank

from harness.records.stats import Fall, fall, is_collapsed, log_rank


def up_to(*steps: int) -> list[Fall]:
    """Runs that fell at a step, or, below 0, stood up to it."""
    return [Fall(step=abs(step), has_fallen=step > 0) for step in steps]


@pytest.mark.parametrize(
    ("curve", "found"),
    [((0.5, 0.6, 0.7), (60, False)), ((0.5, 0.1, 0.1), (40, True)), ((0.1, 0.5, 0.1), (60, True)),
     ((0.1, 0.1, 0.1), (20, True)), ((0.1, 0.1, 0.2), (60, False)), ((0.5, 0.0, 0.199), (40, True))],
)  # fmt: skip
def test_a_run_falls_where_it_stays_down(curve: tuple[float, ...], found: tuple[int, bool]) -> None:
    at = fall([20, 40, 60], curve, start=0.4)
    assert (at.step, at.has_fallen) == found
    assert at.has_fallen == is_collapsed(0.4, curve[-1])


def test_a_run_that_diverged_fell_and_a_start_that_nobody_saw_is_none_to_fall_from() -> None:
    assert fall([20, 40, 60], (0.5, 0.0, 0.0), 0.4, has_diverged=True) == Fall(step=40, has_fallen=True)
    assert fall([20, 40, 60], (0.5, 0.5, 0.5), 0.4, has_diverged=True) == Fall(step=60, has_fallen=True)
    for start in (0.0, math.nan):
        assert fall([20, 40, 60], (0.0, 0.0, 0.0), start, has_diverged=True) == Fall(step=20, has_fallen=True)
        assert fall([20, 40, 60], (0.1, 0.0, 0.0), start, has_diverged=True) == Fall(step=40, has_fallen=True)
    assert fall([20, 40], (0.5, 0.0), math.nan) == Fall(step=40, has_fallen=False)
    assert fall([20, 40], (0.01, 0.0), 0.04) == Fall(step=40, has_fallen=False)
    with pytest.raises(ValueError, match=r"steps=\[20\]: an evaluation after the start for each of 2 accuracies"):
        fall([20], (0.1, 0.2), 0.4)


def test_falls_beyond_those_expected_by_hand() -> None:
    """At 10 one of 2 + 2 falls, half of it the arm's to be; at 20 one of 1 + 2, a third; at 30 both of the control."""
    arm, control = up_to(10, 20), up_to(30, 30)
    assert log_rank(arm, control).excess == pytest.approx(1 - 1 / 2 + 1 - 1 / 3)
    assert log_rank(control, arm).excess == pytest.approx(-(1 - 1 / 2 + 1 - 1 / 3))
    assert log_rank(up_to(-9, -9), up_to(-9, -9)).excess == 0
    assert math.isnan(log_rank([], []).excess)


def variance(arm: list[Fall], control: list[Fall]) -> float:
    """Hypergeometric variance of the statistic."""
    total = 0.0
    for time in {run.step for run in (*arm, *control) if run.has_fallen}:
        n1, n = (sum(run.step >= time for run in runs) for runs in (arm, [*arm, *control]))
        d = sum(run.step == time and run.has_fallen for run in (*arm, *control))
        total += 0.0 if n < 2 else n1 * (n - n1) * d * (n - d) / (n * n * (n - 1))
    return total


def censored(runs: list[Fall]) -> CensoredData:
    """The runs as scipy has them."""
    return CensoredData(
        uncensored=[run.step for run in runs if run.has_fallen], right=[run.step for run in runs if not run.has_fallen]
    )


def test_the_statistic_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = rng.integers(1, 9, (2, 12)), rng.random((2, 12)) < 0.6
        arm, control = (
            [Fall(step=int(step), has_fallen=bool(fell)) for step, fell in zip(*row, strict=True)]
            for row in zip(*drawn, strict=True)
        )
        found = logrank(censored(arm), censored(control))
        own = log_rank(arm, control).excess / math.sqrt(variance(arm, control))
        assert own == pytest.approx(found.statistic, abs=1e-9)


def test_p_is_the_share_of_exchanges_within_pairs() -> None:
    arm, control = up_to(10, 20, 20, -60, 40), up_to(-60, -60, 40, -60, 20)
    seen, found = abs(log_rank(arm, control).excess), list[float]()
    for exchanged in product((False, True), repeat=5):
        pairs = [(b, a) if swap else (a, b) for a, b, swap in zip(arm, control, exchanged, strict=True)]
        found.append(abs(log_rank([a for a, _ in pairs], [b for _, b in pairs]).excess))
    assert log_rank(arm, control).p == np.mean([value >= seen - 1e-9 for value in found])
    assert log_rank(up_to(*[10] * 6), up_to(*[-60] * 6)).p == 2 / 2**6
    assert log_rank(up_to(-60, -60), up_to(-60, -60)).p == 1
    assert math.isnan(log_rank([], []).p)
    assert math.isnan(log_rank(up_to(*[10] * 17), up_to(*[10] * 17)).p)
    with pytest.raises(ValueError, match="1 runs of the arm and 2 of the control are no pairs"):
        log_rank(up_to(10), up_to(10, 20))


def test_what_pairs_could_have_shown_at_most() -> None:
    """Pairs of which both or none fell at one step, and pairs beyond the last fall, can show nothing."""
    assert log_rank(up_to(10, -60, 20), up_to(-60, 10, -60)).least_p == 2 / 2**3
    assert log_rank(up_to(10, 20), up_to(10, 20)).least_p == 1
    assert log_rank(up_to(10, *[-60] * 5), up_to(*[-60] * 6)).least_p == 1
    found = log_rank(up_to(10, 10, -60, -60), up_to(-60, -60, 10, -60))
    assert (found.p, found.least_p) == (1.0, 2 / 2**3)


def test_where_bases_fall_together_it_is_wrong_at_most_as_often_as_it_says() -> None:
    """Half of the bases never fall; on the others both runs do, soon: nothing is between arm and control."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(600):
        weak = rng.random(10) < 0.5
        steps = np.ceil(rng.exponential(np.where(weak, 3.0, 100.0), (2, 10))).astype(int)
        arm, control = ([Fall(step=min(int(s), 10), has_fallen=s <= 10) for s in row] for row in steps)
        wrong += log_rank(arm, control).p <= 0.05
    assert wrong / 600 < 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 600)


def test_it_sees_an_arm_that_falls() -> None:
    rng, seen = np.random.default_rng(2), 0
    for _ in range(200):
        steps = np.ceil(rng.exponential([[5.0], [60.0]], (2, 12))).astype(int)
        arm, control = ([Fall(step=min(int(s), 10), has_fallen=s <= 10) for s in row] for row in steps)
        seen += log_rank(arm, control).p <= 0.05
    assert seen / 200 > 0.9
