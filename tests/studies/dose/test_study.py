"""The whole study on runs of a known curve."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.studies.dose.points import NONE
from harness.studies.dose.study import MIN_RUNS, finding, prediction, study
from tests.studies.dose import made


def test_the_study_finds_the_curve_and_what_it_says_of_other_tasks() -> None:
    rows = made.cloud(24)
    other = made.point(0.0, 1.0, "w", task="wordmath")
    rare = [made.point(0.5, 1.0, "r", correction="ACR", run_id=f"r{k}") for k in range(MIN_RUNS - 1)]
    s = study([*rare, other, *rows])
    assert {p.correction for p in s.points} == {"none", "TIS"} and s.points[0].correction == NONE
    assert len(s.points) == len(rows) and s.others == [other]
    assert set(s.additions) == set(s.candidates) == {"none", "TIS"}
    assert prediction(s, "none", 1.0) == pytest.approx(made.lost(1.0), abs=0.03)
    assert prediction(s, "TIS", 1.0) == pytest.approx(made.lost(1.0, "TIS"), abs=0.03)
    assert math.isnan(prediction(s, "ACR", 1.0))


def test_runs_that_collapsed_are_in_no_mean() -> None:
    rows = made.cloud(24)
    fallen = [replace(p, loss=0.9, has_collapsed=True, run_id=f"{p.run_id} again") for p in rows]
    s, both = study(rows), study([*rows, *fallen])
    assert prediction(both, "none", 1.0) == prediction(s, "none", 1.0)
    assert [r.dose for r in both.reached] == [r.dose for r in s.reached]
    assert sum(b.collapsed.count for b in both.bins) == len(rows) and sum(b.collapsed.count for b in s.bins) == 0


def test_other_kinds_and_predicted_runs_are_in_no_curve() -> None:
    rows = made.cloud(24)
    stale = [replace(p, loss=0.9, kind="staleness", run_id=f"{p.run_id} s") for p in rows]
    said = [replace(p, loss=0.9, is_held_out=True, run_id=f"{p.run_id} h") for p in rows]
    s, more = study(rows), study([*rows, *stale, *said])
    assert (more.points, more.reached, more.additions, more.candidates) == (
        s.points,
        s.reached,
        s.additions,
        s.candidates,
    )
    assert not s.kinds and set(more.kinds) == set(more.within) == {("sort", "none"), ("sort", "TIS")}
    ours, theirs = more.kinds["sort", "none"]
    assert (ours.kind, ours.num_runs, theirs.kind, theirs.num_runs) == ("format", 192, "staleness", 96)


def test_the_finding_names_the_doses_of_a_tenth() -> None:
    s = study(made.cloud(24))
    row, tis = (next(r for r in s.reached if r.correction == name and r.loss == 0.1) for name in (NONE, "TIS"))
    assert finding(s) == (
        f"0.1 of accuracy is lost without a correction at {row.dose:.2g} [{row.low:.2g}, {row.high:.2g}], "
        f"with TIS at {tis.dose:.2g} [{tis.low:.2g}, {tis.high:.2g}] of k3 x length (sorting digits)"
    )
    harmless = study([replace(p, loss=p.loss / 10) for p in made.cloud(24)])
    assert finding(harmless) == "No dose that was run costs 0.1 of accuracy"


def test_too_few_runs_are_refused() -> None:
    rows = [p for p in made.cloud(4) if p.correction == NONE]
    with pytest.raises(ValueError, match="16 runs of sort without a correction; it takes at least 20"):
        study(rows)
