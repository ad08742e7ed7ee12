"""Performance profiles by hand and by simulation, and the figure of a sweep."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from harness.report.plots.profiles import improvements, profile, profile_figure, run_scores
from harness.report.plots.save import save_png
from harness.report.scores import score_arms
from tests import result_factory as factory


def test_profile_by_hand() -> None:
    """Strata weigh the same however many runs they have, and a run at tau is not above it."""
    found = profile([np.array([0.2, 0.6]), np.array([0.5, 0.5, 0.9, 0.1])], np.array([0.0, 0.5, 0.55, 0.95]))
    assert found.fraction.tolist() == [1.0, (1 / 2 + 1 / 4) / 2, (1 / 2 + 1 / 4) / 2, 0.0]
    assert found.num_runs == 6
    half = math.sqrt(math.log(40) / (2 * (4 / (1 / 2 + 1 / 4))))
    assert found.high[1] == pytest.approx(min(1, 0.375 + half)) and found.low[1] == max(0, 0.375 - half)


def test_profile_of_three_runs_is_wide_and_of_nothing_unknown() -> None:
    three = profile([np.array([0.4, 0.5, 0.6])], np.array([0.45]))
    assert three.low[0] == 0 and three.high[0] == 1  # 2 / 3 +- 0.78
    assert np.isnan(profile([], np.array([0.1])).fraction).all()


def test_the_band_holds_a_mixture_of_strata() -> None:
    """Two strata of different distributions: the whole curve is inside at least 95 % of the time, by binomial error."""
    rng = np.random.default_rng(0)
    taus = np.linspace(0, 1, 51)
    truth = ((1 - taus) + np.clip(1 - 2 * taus, 0, 1)) / 2
    inside = 0
    for _ in range(400):
        found = profile([rng.random(4), rng.random(6) / 2], taus)
        inside += bool(np.all((found.low <= truth) & (truth <= found.high)))
    assert inside / 400 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)


def test_improvements_over_lengths() -> None:
    runs = [
        factory.result(m, p, seed=s, task__n=n)[0]
        for m, p in (("bf16", "bf16"), ("naive", "int8"), ("naive", "int3"))
        for n in (8, 16)
        for s in range(3)
    ]
    rows = {row["arm"]: row for row in improvements(*score_arms(runs), "bf16").to_dict("records")}
    assert set(rows) == {"naive int8", "naive int3"} and rows["naive int3"]["settings"] == 2
    assert rows["naive int3"]["improvement"] == 0 and rows["naive int3"]["improvement_high"] < 0.5
    assert rows["naive int8"]["improvement_low"] < 0.5 < rows["naive int8"]["improvement_high"]
    assert improvements(*score_arms([r for r in runs if r.config["task"]["n"] == 8]), "bf16").empty


def test_a_precision_that_ran_in_fewer_settings_is_compared_there() -> None:
    both = [(method, precision, n) for method, precision in (("bf16", "bf16"), ("naive", "int8")) for n in (8, 16)]
    cells = [*both, ("naive", "fp16", 8)]
    runs = [factory.result(m, p, seed=seed, task__n=n)[0] for m, p, n in cells for seed in range(3)]
    runs += [factory.result("naive", "int4", seed=seed, task__n=8)[0] for seed in range(2)]  # too few for a line
    runs += [factory.result("naive", "int3", seed=seed, task__n=32)[0] for seed in range(3)]  # the control is not there
    arms, scores = score_arms(runs)
    figure = profile_figure(arms, scores)
    assert figure is not None
    panels = {ax.get_title(): ax for ax in figure.axes if ax.get_title()}
    assert set(panels) == {"int8", "fp16\nn=8"}
    assert figure.get_supxlabel().endswith(" over n=8, n=16")
    control = [run_scores(scores[arm.label]) for arm in arms if arm.method == "bf16"]
    for title, strata in (("int8", control), ("fp16\nn=8", control[:1])):
        drawn = np.asarray(panels[title].lines[0].get_ydata(), dtype=float)
        assert (drawn == profile(strata, np.linspace(0, 1, 201)).fraction).all(), title


def test_many_settings_are_counted() -> None:
    cells = [("bf16", "bf16", n) for n in (8, 16, 32, 64)] + [("naive", "int8", n) for n in (8, 16, 32)]
    runs = [factory.result(m, p, seed=seed, task__n=n)[0] for m, p, n in cells for seed in range(3)]
    figure = profile_figure(*score_arms(runs))
    assert figure is not None
    assert [ax.get_title() for ax in figure.axes] == ["int8\n3 of 4 settings"]
    assert figure.get_supxlabel().endswith(" over 4 settings")


def test_the_figure_has_a_panel_per_precision_with_the_control_in_each(tmp_path: Path) -> None:
    arms, scores = score_arms([result for result, _ in factory.sweep_results(seeds=3)])
    figure = profile_figure(arms, scores)
    assert figure is not None
    panels = {ax.get_title(): ax for ax in figure.axes if ax.get_title()}
    assert set(panels) == {"int8", "fp8_block", "nvfp4", "int4"}
    lines = {str(text.get_text()) for text in panels["int4"].get_legend().get_texts()}  # pyright: ignore[reportOptionalMemberAccess]
    assert lines == {"bf16", "naive", "flashrl", "naive bypass_ppo"}
    drawn = np.asarray(panels["int4"].lines[0].get_ydata(), dtype=float)
    control = run_scores(scores[next(arm.label for arm in arms if arm.method == "bf16")])
    assert drawn[0] == 1 and drawn[-1] == 0 and drawn[np.searchsorted(np.linspace(0, 1, 201), control.min())] < 1
    assert save_png(lambda: figure, tmp_path / "a" / "profiles.png")[0].read_bytes()[:4] == b"\x89PNG"
    arms, scores = score_arms([result for result, _ in factory.sweep_results(seeds=2)])
    assert len(arms) > 2 and profile_figure(arms, scores) is None  # no line has three runs
    assert profile_figure(arms[:1], scores) is None and save_png(lambda: None, tmp_path / "b.png") == []
