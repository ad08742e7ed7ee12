"""The curve of losses by dose, held against a brute-force monotone fit and intervals computed another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as distributions

from harness.records.stats import Floats
from harness.studies.dose import curve
from harness.studies.dose.points import Point
from tests.studies.dose import made


def brute_force(doses: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """The never-falling least-squares fit by its max-min formula: at i the largest, over starts up to i, of the
    smallest mean, over ends from i on."""
    levels = np.unique(doses)
    inside = [losses[doses == level] for level in levels]
    values = [
        max(
            min(float(np.concatenate(inside[start : end + 1]).mean()) for end in range(i, len(levels)))
            for start in range(i + 1)
        )
        for i in range(len(levels))
    ]
    return levels, np.array(values)


def test_the_fit_is_the_best_never_falling_one() -> None:
    rng = np.random.default_rng(0)
    doses = rng.integers(1, 12, 40).astype(float)  # with ties
    losses = 0.05 * doses + 0.2 * rng.standard_normal(40)
    levels, values = curve.fitted(doses, losses)
    expected = brute_force(doses, losses)
    assert levels.tolist() == expected[0].tolist() and values == pytest.approx(expected[1])
    assert (np.diff(values) >= 0).all() and (np.diff(values) > 0).any()


def test_predictions_are_straight_in_the_logarithm_and_flat_beyond() -> None:
    known = (np.array([0.1, 1.0, 10.0]), np.array([0.0, 0.2, 0.6]))
    asked = np.array([0.001, 0.1, math.sqrt(0.1), 1.0, math.sqrt(10), 10.0, 500.0])
    assert curve.predicted(known, asked).tolist() == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.4, 0.6, 0.6])
    assert curve.dose_of(known, 0.1) == 1.0 and curve.dose_of(known, 0.2) == 1.0 and curve.dose_of(known, 0.21) == 10
    assert math.isinf(curve.dose_of(known, 0.7))


def test_the_share_explained_is_that_of_squares() -> None:
    y = np.array([1.0, 2.0, 3.0])
    assert curve.explained(y, np.zeros(3)) == 1 and curve.explained(y, y - 2) == 0
    assert curve.explained(y, np.array([0.5, 0.0, 0.5])) == pytest.approx(0.75)
    assert math.isnan(curve.explained(np.full(3, 0.1), np.zeros(3)))


def test_bins_hold_their_runs_and_intervals_hold_together() -> None:
    rows = [made.point(0.01 * k, 0.05, f"b{k}") for k in range(5)]  # 0 to 0.04
    rows += [made.point(0.3, 0.5, f"b{k}", has_collapsed=k < 2) for k in range(2)]
    rows += [made.point(0.2, 2.0, f"b{k}", has_collapsed=k == 0) for k in range(3)]
    rows += [made.point(0.1, 0.05, "b0", correction="TIS")]
    found = {(b.correction, b.low): b for b in curve.bins(rows)}
    assert [(name, b.name, b.num_runs, b.num_bases) for (name, _), b in found.items()] == [
        ("none", "0.03 to 0.1", 5, 5), ("none", "0.3 to 1", 2, 2), ("none", "1 to 3", 3, 3),
        ("TIS", "0.03 to 0.1", 1, 1),
    ]  # fmt: skip
    first = found["none", 0.03]
    # One bin alone has three bases that did not collapse, so its level is 95 % itself.
    width = distributions.t.ppf(0.975, 4) * np.std([0, 0.01, 0.02, 0.03, 0.04], ddof=1) / math.sqrt(5)
    assert (first.loss, first.loss_low, first.loss_high) == pytest.approx((0.02, 0.02 - width, 0.02 + width))
    assert math.isnan(found["none", 0.3].loss) and found["none", 0.3].collapsed.count == 2
    assert found["none", 1.0].loss == pytest.approx(0.2) and math.isnan(found["none", 1.0].loss_low)
    assert str(found["none", 1.0].collapsed).startswith("1 of 3")
    twice = [*rows, *(made.point(0.01 * k, 5.0, f"c{k}") for k in range(4))]
    both = next(b for b in curve.bins(twice) if b.dose == 0.05 and b.correction == "none")
    wider = distributions.t.ppf(1 - 0.025 / 2, 4) / distributions.t.ppf(0.975, 4)
    assert both.loss_high - both.loss == pytest.approx(wider * width), "Bonferroni over the bins with an interval"
    assert curve.bins([made.point(0.1, 40.0)])[0].name == "from 10"


def test_the_known_curve_is_found_again() -> None:
    rows = made.cloud(60, noise=0.02)
    found = {(r.correction, r.loss): r for r in curve.reached(rows, ["none", "TIS"], "none")}
    for (correction, loss), row in found.items():
        truth = made.dose_at(loss, correction)
        assert row.low <= row.dose <= row.high and row.low < row.high
        assert row.low < truth < row.high and row.dose == pytest.approx(truth, rel=0.4)
        if correction == "TIS":
            assert row.ratio == pytest.approx(made.BORNE["TIS"], rel=0.35) and row.ratio_low < 4 < row.ratio_high
        else:
            assert (row.ratio, row.ratio_low, row.ratio_high) == (1, 1, 1)
    assert len(found) == 6


def test_whole_bases_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "DRAWS", 40)
    rows = made.cloud(8, noise=0.03)
    (_, row, _) = curve.reached(rows, ["none"], "none")
    bases = list(dict.fromkeys(p.base for p in rows))
    rng = np.random.default_rng(0)
    doses = list[float]()
    for _ in range(40):
        drawn = [bases[i] for i in rng.integers(len(bases), size=len(bases))]
        own: list[Point] = [p for base in drawn for p in rows if p.base == base and p.correction == "none"]
        levels, values = brute_force(np.array([p.dose for p in own]), np.array([p.loss for p in own]))
        doses.append(min((float(x) for x, y in zip(levels, values, strict=True) if y >= row.loss), default=math.inf))
    assert sum(math.isfinite(dose) for dose in doses) > 30 and len(set(doses)) > 3
    assert (row.low, row.high) == pytest.approx((sorted(doses)[1], sorted(doses)[39])), "2.5 and 97.5 % of forty"
