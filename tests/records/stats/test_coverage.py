"""Do the intervals hold the truth as often as they say, and the verdicts err as rarely? By simulation, fixed seeds.

A share of n simulations with true value p has standard error sqrt(p (1 - p) / n); a bound here is the claim plus or
minus three of them, and controls that must fail are held to failing.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from harness.devtools.bench import coverage, runner
from harness.records import stats

SIMS = 200


def error(p: float = 0.95, sims: int = SIMS) -> float:
    """Three standard errors of a share."""
    return 3 * math.sqrt(p * (1 - p) / sims)


@pytest.mark.parametrize("world", ["spread", "answers"])
@pytest.mark.parametrize("num_seeds", [2, 3, 5, 8])
def test_intervals_cover(world: coverage.World, num_seeds: int) -> None:
    found = coverage.coverage(world, num_seeds, SIMS, np.random.default_rng(num_seeds))
    for name in ("mean", "iqm", "paired", "crossed"):
        assert found[name] >= 0.94 - error(0.94), (name, found[name])
    assert found["mean"] <= 0.97 + error(0.97) and found["paired"] <= 0.96 + error(0.96)


def test_seeds_alone_do_not_cover_new_questions() -> None:
    """The control: with many seeds and few questions, the interval over seeds is about new seeds only."""
    found = coverage.coverage("spread", 24, 300, np.random.default_rng(1))
    assert found["paired_new"] < 0.88 < 0.93 - error(0.93, 300) <= found["crossed"]
    assert found["paired"] >= 0.94 - error(0.94, 300)


def test_three_seeds_cannot_see_a_rare_collapse() -> None:
    """If 3 runs in 10 collapse, three of them often show none: no interval over 3 seeds holds the mean as promised,
    and eight seeds do."""
    few, more = (coverage.coverage("collapse", n, SIMS, np.random.default_rng(n))["mean"] for n in (3, 8))
    assert few < 0.88 and more > 0.90


@pytest.mark.parametrize("probability", [0.5, 0.75, 0.95])
@pytest.mark.parametrize("num_runs", [3, 5, 8])
def test_probability_of_improvement_and_profile_cover(probability: float, num_runs: int) -> None:
    found = coverage.chances(num_runs, probability, SIMS, np.random.default_rng(num_runs))
    assert found["improvement"] >= 0.95 - error()
    assert found["improvement_two"] >= 0.95 - error()
    assert found["profile"] >= 0.95 - error()
    if num_runs == 3:
        assert found["improvement_bootstrap"] < 0.85


def test_the_bootstrap_question_by_question_would_not_cover() -> None:
    """The control: treating every answer as its own trial misses far more often than 5 %."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(300):
        chance = 0.7 + rng.normal(0, 0.05, (4, 1)) * np.ones(256)
        answers = (rng.random((4, 256)) < np.clip(chance, 0, 1)).ravel()
        half = 1.96 * answers.std() / math.sqrt(answers.size)
        missed += abs(answers.mean() - 0.7) > half
    assert missed / 300 > 0.25


def test_mcnemar_is_no_test_of_a_method() -> None:
    """Equal methods whose seeds differ: it alarms far too often. Equal runs: at most in 5 % of the cases."""
    rng = np.random.default_rng(0)
    alarms = {0.0: 0, 0.05: 0}
    for sd in alarms:
        for _ in range(200):
            arm, control = (
                (rng.random((3, 128)) < (0.6 + rng.normal(0, sd, (3, 1))).clip(0, 1)).astype(float) for _ in range(2)
            )
            alarms[sd] += stats.mcnemar(arm, control).p < 0.05
    assert alarms[0.0] / 200 <= 0.05 + error(0.05, 200) and alarms[0.05] / 200 > 0.15


def test_verdicts_err_as_rarely_as_they_promise() -> None:
    rng = np.random.default_rng(0)
    for size in (3, 5, 8):
        null = coverage.verdicts(size, coverage.SEED_SD, 0.0, 1000, rng)
        assert null["better"] + null["worse"] <= 0.05 + error(0.05, 1000)
        border = coverage.verdicts(size, coverage.SEED_SD, stats.DELTA, 1000, rng)
        assert border["equal"] <= 0.025 + error(0.025, 1000) and border["worse"] <= 0.01
    assert coverage.verdicts(17, coverage.SEED_SD, 0.0, 300, rng)["equal"] > 0.8


def test_the_seeds_asked_for_give_a_verdict() -> None:
    """80 % are promised by the s.d. of the pilot; that of 3 is too small as often as not, and 8 know it better."""
    rng = np.random.default_rng(3)
    effect, sd = stats.DELTA, coverage.SEED_SD
    shares = [coverage.advised(pilot, sd, effect, 400, rng) for pilot in (3, 5, 8)]
    assert [share[0] for share in shares] == pytest.approx([0.82, 0.56, 0.30], abs=error(0.5, 400))
    assert [share[1] for share in shares] == pytest.approx([0.78, 0.89, 0.94], abs=error(0.8, 150))
    assert [share[2] for share in shares] == pytest.approx([9, 12, 16], abs=2)
    assert coverage.advised(5, 0.001, 0.1, 20, rng) == pytest.approx((0.0, math.nan, math.nan), nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["spread", "answers"])
@pytest.mark.parametrize("num_seeds", coverage.SIZES)
def test_intervals_cover_closely(world: coverage.World, num_seeds: int) -> None:
    found = coverage.coverage(world, num_seeds, 2000, np.random.default_rng(num_seeds))
    for name in ("mean", "iqm", "paired", "crossed"):
        assert 0.935 - error(0.935, 2000) <= found[name] <= 0.98 + error(0.98, 2000), (name, found[name])


def test_the_command_writes_table_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "SIZES", (2, 3))
    words = ["--sims", "4", "--results", str(tmp_path)]
    assert runner.run("coverage", words) == 0 and not (tmp_path / "tables").exists()
    assert runner.run("coverage", [*words, "--write"]) == 0
    lines = (tmp_path / "tables" / "stats_coverage.md").read_text().splitlines()
    assert any(line.startswith("| spread | bootstrap of the mean") for line in lines)
    assert lines.count("| true difference | pilot | cannot tell | decided | seeds in all, median |") == 1
    assert (tmp_path / "figures" / "stats" / "coverage.png").read_bytes()[:4] == b"\x89PNG"
