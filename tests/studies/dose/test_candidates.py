"""Candidate doses by their error on held-out places, against a fit of each place written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.records.stats import mean_interval
from harness.studies.dose.candidates import candidates, held_out_errors
from harness.studies.dose.points import DOSE
from tests.studies.dose import made
from tests.studies.dose.test_curve import brute_force

ROWS = made.cloud(16, noise=0.02, corrections=("none",))


@pytest.mark.parametrize("name", [DOSE, "k3 alone"])
def test_errors_are_those_of_a_curve_without_the_place(name: str) -> None:
    found = held_out_errors(ROWS, name)
    assert len({p.held_out for p in ROWS}) == 4
    for size, length in made.PLACES:
        inside = np.array([(p.size, p.length) == (size, length) for p in ROWS])
        others = [p for p, is_inside in zip(ROWS, inside, strict=True) if not is_inside]
        levels, values = brute_force(np.array([p.doses[name] for p in others]), np.array([p.loss for p in others]))
        own = [p for p, is_inside in zip(ROWS, inside, strict=True) if is_inside]
        said = [np.interp(math.log(p.doses[name]), np.log(levels), values) for p in own]
        assert found[inside] == pytest.approx([p.loss - x for p, x in zip(own, said, strict=True)], abs=1e-12)


def test_one_place_alone_predicts_nothing() -> None:
    assert np.isnan(held_out_errors([p for p in ROWS if p.size == "m"], DOSE)).all()


def test_the_dose_that_made_the_losses_is_the_best() -> None:
    found = candidates(ROWS)
    assert {c.name for c in found} == {DOSE, "k3 x length, first 5 steps", "length alone", "k3 alone"}, "no unknown one"
    by_name = {c.name: c for c in found}
    assert [c.rmse for c in found] == sorted(c.rmse for c in found)
    own, alone = by_name[DOSE], by_name["k3 alone"]
    assert own.rmse < 0.04 and own.r2 > 0.95 and (own.worse, own.worse_low, own.worse_high) == (0, 0, 0)
    assert by_name["length alone"].worse_low > 0 and by_name["length alone"].r2 < 0.1
    squares = {name: held_out_errors(ROWS, name) ** 2 for name in (DOSE, "k3 alone")}
    gain = (squares["k3 alone"] - squares[DOSE]) * 1e4
    assert alone.worse == pytest.approx(gain.mean()) and alone.rmse == pytest.approx(squares["k3 alone"].mean() ** 0.5)
    assert (alone.worse_low, alone.worse_high) == pytest.approx(mean_interval(gain, [p.base for p in ROWS]))
    scaled = by_name["k3 x length, first 5 steps"]
    assert scaled.rmse == pytest.approx(own.rmse), "a factor on all doses moves no order and no distance"


def test_no_runs_have_no_candidates() -> None:
    assert candidates([]) == []
