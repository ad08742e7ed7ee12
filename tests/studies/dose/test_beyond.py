"""Additions of a factor to the dose: found where one was put, not found where none was, p-values by enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from harness.records.stats import holm
from harness.studies.dose import beyond
from harness.studies.dose.points import Point
from tests.studies.dose import made


def uncorrected(bumps: float) -> list[Point]:
    return made.cloud(16, noise=0.02, corrections=("none",), bumps=bumps)


def test_a_format_that_loses_more_is_found() -> None:
    found = {a.factor: a for a in beyond.additions(uncorrected(bumps=0.1))}
    one = found["format"]
    assert one.p_holm < 0.01 and one.r2_both > one.r2_dose + 0.05 and one.num_levels == 4 and one.num_bases == 16
    assert one.highest[0] == "int4" and one.highest[1] - one.lowest[1] == pytest.approx(0.1, abs=0.03)
    assert all(found[name].p > 0.1 for name in ("length", "size"))


def test_nothing_is_found_where_the_dose_is_all() -> None:
    found = beyond.additions(uncorrected(bumps=0.0))
    assert [a.factor for a in found] == ["format", "length", "size", "engine"]
    known = [a for a in found if not math.isnan(a.p)]
    assert [a.factor for a in known] == ["format", "length", "size"], "one engine is no factor"
    assert [a.p_holm for a in known] == holm([a.p for a in known]) and min(a.p_holm for a in known) > 0.05
    assert math.isnan(found[3].p_holm) and found[3].num_levels == 1
    assert all(0.9 < a.r2_dose <= a.r2_both <= 1 for a in found)


def test_rare_levels_are_put_together() -> None:
    rows = [made.point(0.1 * k, 10.0**k, f"b{k}", precision=name) for name in ("int8", "int4") for k in range(4)]
    rows += [made.point(0.1, 1.0, "b1", precision=name) for name in ("nf4", "mxfp4", "int3")]
    assert beyond.additions(rows)[0].num_levels == 3  # int8, int4, and the three others


def test_the_p_value_is_that_of_all_signs_of_the_clusters() -> None:
    rng = np.random.default_rng(3)
    clusters = [str(i) for i in range(7) for _ in range(4)]
    small = np.stack([np.ones(28), rng.standard_normal(28)], 1)
    factor = (np.arange(28) % 2 == 0).astype(float)
    y = small @ np.array([0.3, -0.2]) + 0.9 * factor + rng.standard_normal(28)
    large = np.concatenate([small, factor[:, None]], 1)

    def ratio(values: np.ndarray) -> float:
        left = [float(((values - x @ np.linalg.lstsq(x, values, rcond=None)[0]) ** 2).sum()) for x in (small, large)]
        return (left[0] - left[1]) / left[1]

    fit = small @ np.linalg.lstsq(small, y, rcond=None)[0]
    signs = [np.repeat(one, 4) for one in itertools.product((-1.0, 1.0), repeat=7)]
    exact = float(np.mean([ratio(fit + s * (y - fit)) >= ratio(y) * (1 - 1e-9) for s in signs]))
    assert 0.02 < exact < 0.5
    found = beyond.wild_bootstrap_p(y, small, large, clusters, np.random.default_rng(0))
    assert found == pytest.approx(exact, abs=3 * math.sqrt(exact * (1 - exact) / beyond.DRAWS) + 1 / beyond.DRAWS)


def four_ways(worse: float, num_bases: int = 10) -> list[Point]:
    """Runs on one curve, of four kinds on every base; staleness loses `worse` more. Two bases more have one."""
    rng = np.random.default_rng(7)
    rows: list[Point] = []
    for base in range(num_bases + 2):
        shared = 0.05 * float(rng.standard_normal())
        for kind in ("format", "fixed noise", "fresh noise", "staleness") if base < num_bases else ("format",):
            for turn in range(3):
                dose = 10 ** float(rng.uniform(-1, 1))
                loss = made.lost(dose) + shared + 0.005 * float(rng.standard_normal()) + worse * (kind == "staleness")
                rows.append(made.point(loss, dose, f"b{base}", kind=kind, run_id=f"{base} {kind} {turn}"))
    return rows


def test_a_kind_of_dose_that_loses_more_is_found() -> None:
    rows = four_ways(worse=0.08)
    (one,) = beyond.additions_within(rows)
    assert (one.factor, one.num_levels, one.num_runs, one.num_bases) == ("kind", 4, 120, 10) and one.p_holm < 0.01
    assert one.highest[0] == "staleness" and one.r2_both > one.r2_dose
    found = {k.kind: k for k in beyond.kinds(rows)}
    assert list(found) == ["format", "fixed noise", "fresh noise", "staleness"], "formats first"
    stale = found["staleness"]
    assert stale.low < 0.08 < stale.high and stale.low > 0.05 and stale.beyond == pytest.approx(0.08, abs=0.015)
    assert all(found[name].low < 0 < found[name].high for name in ("fixed noise", "fresh noise"))
    assert found["format"].beyond == 0.0 and found["format"].num_runs == 30


def test_kinds_alike_add_nothing() -> None:
    (one,) = beyond.additions_within(four_ways(worse=0.0))
    assert one.p > 0.1
    assert not beyond.additions_within(uncorrected(bumps=0.1)) and not beyond.kinds(uncorrected(bumps=0.1))


def test_channel_spreads_are_compared_where_they_vary() -> None:
    rows = [
        made.point(
            made.lost(dose) + 0.1 * (spread == 1.0), dose, f"b{base}", spread=spread, run_id=f"{base} {spread} {dose}"
        )
        for base in range(8) for spread in (0.0, 1.0) for dose in (0.2 + 0.01 * base, 1.0, 5.0 - 0.1 * base)
    ]  # fmt: skip
    (one,) = beyond.additions_within([*rows, *uncorrected(bumps=0.0)])
    assert (one.factor, one.num_bases, one.num_runs) == ("spread", 8, 48)
    assert one.highest[0] == "1" and one.highest[1] - one.lowest[1] == pytest.approx(0.1, abs=0.01) and one.p < 0.02


def test_runs_that_collapsed_are_counted_and_in_no_mean() -> None:
    rows = four_ways(worse=0.0)
    fallen = [replace(p, loss=0.9, has_collapsed=True, run_id=f"{p.run_id}x") for p in rows if p.kind == "staleness"]
    for one, other in zip(beyond.kinds(rows), beyond.kinds([*rows, *fallen]), strict=True):
        assert (one.loss, one.beyond, one.dose) == (other.loss, other.beyond, other.dose)
        assert other.num_collapsed == (30 if one.kind == "staleness" else 0)


def test_the_curve_is_a_broken_line() -> None:
    doses = np.array([0.001, 0.1, 1.0, 10.0])
    columns = beyond.curve_columns(doses)
    assert columns.shape == (4, 2 + len(beyond.KNOTS))
    assert columns[:, :2].tolist() == pytest.approx(np.array([[1, -3], [1, -1], [1, 0], [1, 1]]))
    assert columns[3, 2:].tolist() == [2.5, 2.0, 1.5, 1.0, 0.5, 0.0] and columns[0, 2:].tolist() == [0.0] * 6
