"""The badge rule, every kind of test on hand-made runs, and where the runs come from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from harness.published.claims.badges import badge_of, is_equal, judge
from harness.published.claims.estimates import ClaimEstimate, estimate
from harness.published.claims.evidence import load, number, select
from harness.published.claims.kinds import Contrast, Growth, Level, NotTestable, Ratio, Replay, Trend
from harness.published.claims.page import shown
from harness.records.packed import pack
from harness.records.paths import purpose_path
from harness.records.run_result import write_result
from harness.records.stats.looks import crossing_chance
from tests import result_factory as factory
from tests.published.claims.hand_made import BF16, HALF, NAIVE, found, of, run


@pytest.mark.parametrize(
    ("interval", "expect", "outcome"),
    [
        ((0.11, 0.30), "above", "supported"),
        ((0.10, 0.30), "above", "undecided"),
        ((-0.20, 0.09), "above", "contradicted"),
        ((-0.20, 0.09), "below", "supported"),
        ((0.11, 0.30), "below", "contradicted"),
        ((0.05, 0.20), "below", "undecided"),
        ((0.11, 0.14), "above", "undecided"),
        ((0.06, 0.09), "above", "undecided"),
        ((0.11, 0.16), "above", "supported"),
        ((0.06, 0.09), "below", "undecided"),
        ((0.06, 0.14), "equal", "supported"),
        ((0.04, 0.14), "equal", "undecided"),
        ((0.11, 0.14), "equal", "supported"),
        ((0.16, 0.20), "equal", "contradicted"),
        ((-0.20, 0.04), "equal", "contradicted"),
        ((0.06, 0.90), "not_below", "supported"),
        ((0.04, 0.90), "not_below", "undecided"),
        ((-0.20, 0.04), "not_below", "contradicted"),
        ((-0.20, 0.14), "not_above", "supported"),
        ((-0.20, 0.16), "not_above", "undecided"),
        ((0.16, 0.20), "not_above", "contradicted"),
    ],
)
def test_the_outcome_at_threshold_01_and_margin_005(interval, expect, outcome):
    assert judge(*interval, expect, 0.1, 0.05) == outcome


def test_outside_the_domain_nothing_is_supported_or_contradicted():
    assert badge_of("supported", True, "smaller") == "direction supported"
    assert badge_of("supported", True, "same") == "supported"
    assert badge_of("contradicted", True, "smaller") == "contradicted in its own domain"
    assert badge_of("undecided", True, "same") == "undecided"
    for outcome in ("supported", "contradicted", "undecided"):
        assert badge_of(outcome, False, "same") == "out of domain"
    assert badge_of("not testable here", False, "same") == "not testable here"


def test_contrast_is_the_paired_t_interval_of_the_auc():
    # AUC is the mean over evaluations after step 0: 1/2, 3/4, 1 against 1/4 in every seed.
    quarters = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    runs = [run("naive", s, {0: [0, 0, 0, 0], 20: q, 40: q}) for s, q in enumerate(quarters)]
    runs += [run("bf16", s, {0: [1, 1, 1, 1], 20: [0, 0, 0, 0], 40: [1, 1, 0, 0]}) for s in range(4)]
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above")
    got = found(test, of(*runs))
    assert (got.value, got.units) == (0.5, 3)
    assert (got.low, got.high) == pytest.approx((0.5 - HALF * 0.25, 0.5 + HALF * 0.25), abs=1e-12)
    assert (got.outcome, got.reason) == ("undecided", "cannot tell (+1)")
    final = found(Contrast(sweep="standard", a=NAIVE, b=BF16, metric="accuracy", expect="above"), of(*runs))
    assert final.value == 0.25
    gain = found(Contrast(sweep="standard", a=NAIVE, b=BF16, metric="gain", expect="above"), of(*runs))
    assert gain.value == 0.75 - (-0.5) and gain.outcome == "supported"


def test_a_sweep_that_was_enlarged_after_it_was_read_has_a_wider_interval(tmp_path: Path):
    """Looks at 6 and 12 bases: each look has the level that makes 5 % of both."""
    quarters = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    for s, right in enumerate(quarters):
        for one in (run("naive", s, {0: [0] * 4, 20: right}), run("bf16", s, {0: [1] * 4, 20: [0, 0, 0, 1]})):
            write_result(tmp_path / "runs" / "standard", one, [])
    once = load(tmp_path, {"standard": ()})["standard"]
    assert once.level == pytest.approx(0.95)
    path = purpose_path(tmp_path, "standard")
    path.write_text('{"looks": [6, 12]}', encoding="utf-8")
    twice = load(tmp_path, {"standard": ()})["standard"]
    assert crossing_chance((6, 12), 1 - twice.level) == pytest.approx(0.05) and 0.96 < twice.level < 0.975
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above")
    half = student.ppf(0.5 + twice.level / 2, 2) / math.sqrt(3) * 0.25
    wide = found(test, twice)
    assert (wide.low, wide.high) == pytest.approx((0.5 - half, 0.5 + half)) and found(test, once).low > wide.low


def test_the_units_are_bases_and_a_control_of_several_runs_enters_by_their_mean():
    """Arm at 1/4, 1/2 and 3/4 on three bases; the control's two runs at 0 and 1/2 on each."""
    right = {0: [0, 0, 0, 0], 1: [1, 0, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 1, 0]}
    runs = [run("naive", 0, {0: right[3], 20: right[base + 1]}, base=base) for base in range(3)]
    runs += [run("bf16", s, {0: right[3], 20: right[2 * s]}, base=base) for base in range(3) for s in range(2)]
    got = found(Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above"), of(*runs))
    assert (got.value, got.units) == (0.25, 3)
    assert (got.low, got.high) == pytest.approx((0.25 - HALF * 0.25, 0.25 + HALF * 0.25), abs=1e-12)
    level = found(Level(sweep="standard", a=BF16, metric="auc", expect="above", threshold=0.0), of(*runs))
    assert (level.value, level.units) == (0.25, 3)


def test_no_difference_where_one_is_claimed_is_not_supported_and_says_so():
    right = {"naive": (50, 50, 50), "bf16": (50, 51, 49)}
    runs = [run(m, s, {20: [1] * n + [0] * (100 - n)}) for m, counts in right.items() for s, n in enumerate(counts)]
    below = found(Contrast(sweep="standard", a=NAIVE, b=BF16, expect="below"), of(*runs))
    assert below.value == pytest.approx(0) and (below.outcome, below.reason) == ("undecided", "equal within the margin")
    assert found(Contrast(sweep="standard", a=NAIVE, b=BF16, expect="equal"), of(*runs)).outcome == "supported"


def test_bases_that_do_not_differ_decide_nothing():
    runs = [run(m, s, {20: [1, m == "bf16"]}) for m in ("naive", "bf16") for s in range(2)]
    for expect in ("below", "above", "equal"):
        got = found(Contrast(sweep="standard", a=NAIVE, b=BF16, expect=expect), of(*runs))
        assert (got.value, got.units, got.outcome) == (-0.5, 2, "undecided") and math.isnan(got.low)
        assert got.reason == "cannot tell: its bases do not differ, which does not say how far others would lie apart"


@pytest.mark.parametrize(
    ("expect", "mean", "sd", "further"),
    [
        ("above", 0.12, 0.05, 9), ("below", 0.12, 0.05, 9), ("above", 0.09, 0.05, 8), ("equal", 0.12, 0.05, 52),
        ("equal", 0.1, 0.05, 12), ("equal", 0.16, 0.03, 173), ("not_below", 0.09, 0.05, 15),
        ("not_below", 0.1, 0.05, 5), ("not_above", 0.12, 0.05, 50), ("not_above", 0.09, 0.05, 2),
    ],
)  # fmt: skip
def test_the_further_bases_decide_with_a_chance_of_80_percent(expect: Any, mean: float, sd: float, further: int):
    """Simulated by the badge rule itself: a flat prior, so the true number is normal around the mean of five bases."""
    values = mean + sd * np.array([-2, -1, 0, 1, 2]) / math.sqrt(2.5)
    evidence = of(*(run("naive", s) for s in range(5)), kl_k3=[[float(value)] for value in values])
    test = Level(sweep="standard", a=NAIVE, metric="mismatch/kl_k3", expect=expect, threshold=0.1, margin=0.05)
    assert found(test, evidence).reason == f"cannot tell (+{further})"

    def chance(more: int) -> float:
        rng = np.random.default_rng(0)
        truth = rng.normal(mean, sd / math.sqrt(5), 20_000)
        end = (5 * mean + more * rng.normal(truth, sd / math.sqrt(more))) / (5 + more)
        half = student.ppf(0.975, 4 + more) * sd / math.sqrt(5 + more)
        ends = [(x - half, x + half) for x in end]
        flat = [expect in ("above", "below") and is_equal(*x, 0.1, 0.05) for x in ends]
        decided = [judge(*x, expect, 0.1, 0.05) != "undecided" for x in ends]
        return float(np.mean(np.logical_or(flat, decided)))

    assert chance(further - 1) < 0.805 and chance(further) > 0.795


def test_no_number_of_bases_may_be_enough():
    """The mean of twenty bases is the border itself."""
    evidence = of(*(run("naive", s) for s in range(20)), kl_k3=[[0.05], [0.25]] * 10)
    test = Level(sweep="standard", a=NAIVE, metric="mismatch/kl_k3", expect="not_above", threshold=0.1, margin=0.05)
    assert found(test, evidence).reason == "cannot tell (>1000)"


def test_an_end_near_zero_shows_its_side():
    got = ClaimEstimate(outcome="undecided", value=-0.013, low=-0.027, high=0.0002, units=6)
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="below")
    assert shown(test, got) == "-0.013 [-0.027, +0.0002], n = 6"


def test_a_ratio_is_a_geometric_mean_over_pairs():
    runs = [run(m, s, {20: [1]}) for m in ("naive", "bf16") for s in range(3)]
    evidence = of(*runs, kl_k3=[[0.2, 0.2], [0.3, 0.5], [0.8, 0.8], [0.1, 0.1], [0.1, 0.1], [0.1, 0.1]])
    test = Ratio(sweep="standard", a=NAIVE, b=BF16, metric="mismatch/kl_k3", expect="above", threshold=1.5)
    got = found(test, evidence)  # ratios 2, 4, 8: logarithms with mean log 4 and standard deviation log 2
    assert got.value == pytest.approx(4)
    assert (got.low, got.high) == pytest.approx((4 * 2**-HALF, 4 * 2**HALF))
    assert got.outcome == "undecided"  # 4 * 2^-2.48 = 0.71
    assert found(Ratio(sweep="standard", a=NAIVE, b=BF16, metric="mismatch/kl_k3", expect="above",
                       threshold=0.5), evidence).outcome == "supported"  # fmt: skip
    assert shown(test, got) == "x4.00 [0.715, 22.4], n = 3"


def test_growth_compares_the_ends_of_a_run():
    series = [[1, 1, 9, 9, 9, 9, 9, 9, 2, 2], [2, 4, 0, 0, 0, 0, 0, 0, 6, 6], [1, 1, 0, 0, 0, 0, 0, 0, 2, 2]]
    evidence = of(*(run("naive", s) for s in range(3)), kl_k3=series)
    test = Growth(sweep="standard", a=NAIVE, metric="mismatch/kl_k3", expect="above")
    got = found(test, evidence)  # fifths are two steps: 2/1, 6/3, 2/1
    assert (got.value, got.low, got.high) == pytest.approx((2, 2, 2)) and got.outcome == "supported"


def test_a_level_is_the_arms_own_number():
    evidence = of(*(run("naive", s, {20: [1, 1, 1, 0]}) for s in range(3)))
    test = Level(sweep="standard", a=NAIVE, metric="accuracy", expect="below", threshold=0.8)
    assert (found(test, evidence).value, found(test, evidence).outcome) == (0.75, "supported")
    reduced = of(*(run("naive", s) for s in range(2)), kl_k3=[[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, math.nan]])
    by = {"mean": 3.25, "median": 3.25, "max": 5.5, "min": 1, "first": 3.0, "last": 3.5}
    for reduce, value in by.items():
        level = Level(sweep="standard", a=NAIVE, metric="mismatch/kl_k3", reduce=reduce, expect="above", threshold=0)
        assert found(level, reduced).value == pytest.approx(value), reduce
    first = Level(sweep="standard", a=NAIVE, metric="mismatch/kl_k3", reduce="first", expect="above", threshold=0)
    assert (found(first, reduced).outcome, found(first, reduced).reason) == ("supported", "preliminary: 2 bases")


def test_a_trend_is_one_slope_per_pair():
    right = {8: [1, 1, 1, 1], 16: [1, 1, 1, 0], 32: [1, 1, 0, 0]}
    runs = [run("naive", s, {20: a}, task__n=n) for s in range(3) for n, a in right.items()]
    runs += [run("bf16", s, {20: [1, 1, 1, 1]}, task__n=n) for s in range(3) for n in right]
    test = Trend(sweep="standard", a=NAIVE, b=BF16, along="task.n", expect="below")
    got = found(test, of(*runs))
    assert (got.value, got.low) == pytest.approx((-0.25, -0.25)) and got.outcome == "supported"
    per_unit = Trend(sweep="standard", a=NAIVE, along="task.n", per="unit", expect="below")
    assert found(per_unit, of(*runs)).value == pytest.approx(-18 / 896)  # covariance -6, variance 896 / 3, both times 3
    two_places = [one for one in runs if one.config["task"]["n"] != 32]
    assert found(test, of(*two_places)).outcome == "undecided"


def test_the_replay_laboratory_against_a_threshold_and_another_arm():
    def row(arm: str, value: float, low: float, high: float) -> dict[str, Any]:
        place = {"context": "s-sort8", "sampler": "int8", "age": 0, "arm": arm}
        return place | {"bias": value, "bias_low": low, "bias_high": high}

    rows = [row("none", 0.5, 0.4, 0.6), row("tis", 0.1, 0.0, 0.3), row("far", 0.5, 0.35, 0.7),
            row("few", 0.5, math.nan, math.nan)]  # fmt: skip

    def of_arm(arm: str, **values: Any) -> ClaimEstimate:
        test = Replay(context="s-sort8", sampler="int8", arm=arm, column="bias", expect="below", **values)
        return estimate(test, {}, rows)

    assert of_arm("tis", threshold=0.31).outcome == "supported"
    assert of_arm("tis", threshold=0.2).outcome == "undecided"
    assert of_arm("none", threshold=0.3).outcome == "contradicted"
    assert of_arm("tis", against="none") == ClaimEstimate(
        outcome="supported", value=0.1, low=0.0, high=0.3, against=(0.5, 0.4, 0.6)
    )
    assert of_arm("far", against="none").outcome == "undecided"
    assert of_arm("none", against="tis").outcome == "contradicted"
    for arm in ("trm", "few"):  # one that is not there, and one with too few batches
        assert of_arm(arm, threshold=1).reason == (
            f"the replay laboratory has no interval of bias of {arm} on int8 of s-sort8, age 0"
        )
    assert of_arm("tis", against="few").reason.endswith("no interval of bias of few on int8 of s-sort8, age 0")


def test_what_is_missing_is_a_state_and_no_error():
    test = Contrast(sweep="standard", a=NAIVE, b=BF16, expect="above")
    alone = of(run("naive", 0, {20: [1]}))
    assert estimate(test, {}, []) == ClaimEstimate(outcome="undecided", reason="sweep standard has no results")
    assert found(test, alone).reason == "sweep standard has no run of bf16"
    one_pair = found(test, of(run("naive", 0, {20: [1]}), run("bf16", 0, {20: [1]})))
    assert one_pair.outcome == "undecided" and "auc on 1 of the 2 bases" in one_pair.reason
    silent = Level(sweep="standard", a=NAIVE, metric="mismatch/kl_k1", expect="above", threshold=0)
    assert "gives mismatch/kl_k1 on 0 of the 2 bases" in found(silent, alone).reason
    assert estimate(NotTestable(reason="dense"), {}, []) == ClaimEstimate(outcome="not testable here", reason="dense")


def test_settings_that_fit_two_arms_are_an_error_that_names_the_difference():
    evidence = of(run("naive", 0), run("naive", 0, precision="int4"), run("naive", 0, task__n=16))
    with pytest.raises(ValueError, match=r"naive: 3 settings have these; name one of precision.name.*task.n"):
        select(evidence, {"method": "naive"})
    assert len(select(evidence, {"method": "naive", "precision.name": "int8", "task.n": 16})) == 1
    assert select(evidence, {"method": "naive", "knobs.TIS.cap": 2.0}) == ()
    absent = {"method": "naive", "precision.name": "int8", "task.n": 16, "algo.staleness": None}
    assert len(select(evidence, absent)) == 1 and select(evidence, absent | {"algo.staleness": 4}) == ()


def test_failed_runs_do_not_count_and_diverged_ones_score_zero():
    diverged = run("naive", 0, {20: [1, 1]}).model_copy(update={"status": "diverged"})
    failed = run("naive", 1, {20: [1, 1]}).model_copy(update={"status": "failed"})
    evidence = of(diverged, failed)
    assert [one.seed for one in select(evidence, NAIVE)] == [0]
    assert number(evidence, diverged, "auc", "mean") == 0.25  # evaluations at 20, 40, 60, 80; the last three missed
    assert number(evidence, diverged, "reward", "mean") == 0.0


def test_a_packed_sweep_gives_the_same_evidence_and_comes_first(tmp_path: Path):
    for result, rows in factory.sweep_results((("bf16", "bf16", "decoupled"), ("naive", "int4", "decoupled")), seeds=2):
        write_result(tmp_path / "runs" / "quick", result, rows)
    columns = {"mismatch/kl_k3", "train/entropy"}
    plain = load(tmp_path, {"quick": columns})["quick"]
    pack(tmp_path, "quick")
    packed = load(tmp_path, {"quick": columns})["quick"]
    assert sorted(map(str, packed.arms)) == sorted(map(str, plain.arms)) and len(packed.arms) == 2
    assert {run: dict(c) for run, c in packed.series.items()} == {
        run: {name: c[name] for name in columns} for run, c in plain.series.items()
    }
    for path in (tmp_path / "runs" / "quick").iterdir():
        path.unlink()
    assert len(load(tmp_path, {"quick": ()})["quick"].arms) == 2
    (tmp_path / "packed" / "quick.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"quick.zip: not a packed sweep"):
        load(tmp_path, {"quick": ()})
