"""Answers on accuracy: known within the runs, the dose alone beyond them, not known without either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.studies.advise.accuracy import NO_INTERVAL, accuracy, curves_of
from harness.studies.dose.candidates import held_out_errors
from harness.studies.dose.curve import bins, dose_of, fitted
from harness.studies.dose.points import DOSE
from tests.studies.advise.made import SMALL, curves, question
from tests.studies.dose import made

ROWS = made.cloud(60, noise=0.01)


def own(correction: str) -> tuple[np.ndarray, np.ndarray]:
    rows = [p for p in ROWS if p.correction == correction]
    return np.array([p.dose for p in rows]), np.array([p.loss for p in rows])


def test_the_evidence_knows_its_sizes_and_lengths() -> None:
    found = curves()
    assert (found.shortest, found.longest) == (8, 64) and found.most_parameters == 791936, "m is the largest"
    assert set(found.by_correction) == {"none", "TIS"}
    none = found.by_correction["none"]
    assert none.cliff == dose_of(fitted(*own("none")), 0.1) == pytest.approx(made.dose_at(0.1), rel=0.25)
    errors = held_out_errors([p for p in ROWS if p.correction == "none"], DOSE)
    assert none.error == pytest.approx(float(np.sqrt((errors**2).mean())))


@pytest.mark.parametrize("correction", ["none", "TIS"])
def test_within_the_runs_it_is_known_with_their_interval(correction: str) -> None:
    dose = 0.5
    found = accuracy(curves(), question(dose / 32, **SMALL), "int8", correction)
    near = next(b for b in bins(ROWS) if b.correction == correction and b.low <= dose < b.high)
    assert found.kind == "known" and found.dose == pytest.approx(dose)
    assert (found.change, found.low, found.high) == (-near.loss, -near.loss_high, -near.loss_low)
    assert found.low < -made.lost(dose, correction) < found.high and found.num_runs == near.num_runs
    assert found.shown == f"{-near.loss:+.3f} [{-near.loss_high:+.3f}, {-near.loss_low:+.3f}], {near.num_runs} runs"
    assert f"dose 0.5 = k3 0.016 (made) x 32 tokens; {near.num_runs} runs of sorting digits on" in found.words


@pytest.mark.parametrize("beyond", [{"size": "7b"}, {"length": 128}, {"length": 4}])
@pytest.mark.parametrize("correction", ["none", "TIS"])
def test_beyond_the_runs_it_is_the_dose_alone(beyond: dict[str, Any], correction: str) -> None:
    asked: dict[str, Any] = SMALL | beyond
    found = accuracy(curves(), question(2.0 / asked["length"], **asked), "int8", correction)
    levels, values = fitted(*own(correction))
    said = float(np.interp(np.log(2.0), np.log(levels), values))
    assert found.kind == "dose only" and found.change == pytest.approx(-said)
    assert found.change == pytest.approx(-made.lost(2.0, correction), abs=0.03)
    assert np.isnan([found.low, found.high]).all() and found.error == curves().by_correction[correction].error
    assert found.shown == f"not known; if only the dose matters: {found.change:+.3f}, error {found.error:.3f}"


def test_not_known_without_a_mismatch_or_a_run_of_the_dose() -> None:
    none = accuracy(curves(), question(**SMALL), "int8", "none")
    assert none.kind == "not known" and none.shown == (
        "not known: no mismatch is given for int8; lowbit probe measures it"
    )
    far = accuracy(curves(), question(1000.0, **SMALL), "int8", "TIS")
    assert far.shown == "not known: no run had a dose of 3.2e+04 with TIS" and np.isnan(far.change)
    alone = curves_of([p for p in ROWS if p.correction == "none"], "bf16")
    assert accuracy(alone, question(0.01, **SMALL), "int8", "TIS").kind == "not known"


def test_a_dose_of_too_few_bases_has_no_interval() -> None:
    rows = [p for p in ROWS if not 0.3 <= p.dose < 1]
    few = [*rows, *(made.point(0.1, 0.5, f"s sort 8 {k}") for k in range(2))]
    found = accuracy(curves_of(few, "bf16"), question(0.5 / 32, **SMALL), "int8", "none")
    assert (found.kind, found.words) == ("not known", NO_INTERVAL)
    assert accuracy(curves_of(rows, "bf16"), question(0.5 / 32, **SMALL), "int8", "none").words == NO_INTERVAL


def test_deployed_in_the_rollout_format_the_samplers_accuracy_counts() -> None:
    found = accuracy(curves("rollout"), question(0.5 / 32, **SMALL), "int8", "none")
    bf16 = accuracy(curves(), question(0.5 / 32, **SMALL), "int8", "none")
    assert found.change == pytest.approx(bf16.change / 2), "the made runs lose half as much in their own format"
    unknown = [replace(p, deployed_loss=float("nan")) for p in ROWS]
    with pytest.raises(ValueError, match="no packed run of sort has a dose"):
        curves_of(unknown, "rollout")


def test_collapses_are_told_beside_the_mean() -> None:
    fallen = [replace(p, has_collapsed=p.run_id.startswith(("1 ", "2 "))) for p in ROWS]
    found = accuracy(curves_of(fallen, "bf16"), question(1.5 / 32, **SMALL), "int8", "none")
    num = sum(p.correction == "none" and 1 <= p.dose < 3 for p in fallen)
    fell = sum(p.correction == "none" and 1 <= p.dose < 3 and p.has_collapsed for p in fallen)
    assert fell > 0 and found.shown.endswith(f", {fell} of {num} runs at such doses collapsed")
    assert accuracy(curves(), question(1.5 / 32, **SMALL), "int8", "none").collapsed == ""


def test_what_would_change_the_answer() -> None:
    cliff = curves().by_correction["none"].cliff
    below = accuracy(curves(), question(1e-3, **SMALL), "int8", "none")
    assert below.changes == (
        f"the curve loses 0.1 of accuracy at a dose of {cliff:.2g} without a correction: reached from "
        f"{cliff / 1e-3:,.0f} tokens at this k3, or a k3 of {cliff / 32:.2g} at this length",
    )
    above = accuracy(curves(), question(0.1, **SMALL), "int8", "none")
    assert f"avoided below {cliff / 0.1:,.0f} tokens" in above.changes[0]
    assert accuracy(curves(), question(0.0, **SMALL), "int8", "none").changes == ()
    harmless = curves_of([replace(p, loss=0.0) for p in ROWS], "bf16")
    assert accuracy(harmless, question(0.1, **SMALL), "int8", "none").changes == ()
