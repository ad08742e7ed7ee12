"""Figures: curves against numbers by hand, looks that stay apart, and drawings that hold the data they show."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from harness.published.figures.grid import draw_grid
from harness.records.arms import Arm, group_arms
from harness.records.folder import load_series
from harness.records.run_result import RunResult, read_results, write_result
from harness.report.figures import STYLE, draw_all, lines_of, overview, scores, step_label
from harness.report.leaderboard import board_of, leaderboard
from harness.report.plots.bands import over_evaluations, over_profile, over_steps
from harness.report.plots.style import INK, looks_of, small_multiples, style_name
from tests import result_factory as factory

MANY = (
    *factory.QUICK,
    ("bf16_tis", "bf16", "decoupled"),
    ("mis", "int4", "decoupled"),
    ("icepop", "int4", "decoupled"),
    ("naive", "int3", "decoupled"),
)


def arm_of(*results: RunResult) -> Arm:
    (arm,) = group_arms(results)
    return arm


def two_seeds() -> tuple[Arm, list[RunResult]]:
    results = [factory.result("naive", "int4", seed=seed)[0] for seed in range(2)]
    return arm_of(*results), results


def test_over_steps_by_hand() -> None:
    arm, (a, b) = two_seeds()
    series = {a.run_id: {"x": [1.0, 3.0, np.nan, 8.0]}, b.run_id: {"x": [3.0, np.inf]}}
    band = over_steps(arm, series, "x")
    np.testing.assert_array_equal(band.x, [1, 2, 3, 4])
    np.testing.assert_array_equal(band.middle, [2, 3, np.nan, 8])
    np.testing.assert_array_equal(band.low, [1, 3, np.nan, 8])
    np.testing.assert_array_equal(band.high, [3, 3, np.nan, 8])
    smooth = over_steps(arm, {a.run_id: {"x": [1.0, 3.0, np.nan, 8.0]}}, "x", "median", window=2)
    np.testing.assert_array_equal(smooth.middle, [1, 2, 3, 8])
    assert len(over_steps(arm, series, "y").x) == 0


@pytest.mark.parametrize(("center", "middle"), [("mean", 5.0), ("median", 5.0)])
def test_a_base_counts_once_however_many_runs_it_has(center: Literal["mean", "median"], middle: float) -> None:
    made = [factory.result("naive", "int4", seed=seed)[0] for seed in range(4)]
    runs = [run.model_copy(update={"base_seed": run.seed // 3}) for run in made]
    series = {run.run_id: {"x": [value]} for run, value in zip(runs, (1.0, 2.0, 6.0, 7.0), strict=True)}
    band = over_steps(arm_of(*runs), series, "x", center)
    assert (band.middle.tolist(), band.low.tolist(), band.high.tolist()) == ([middle], [1.0], [7.0])


def test_a_diverged_run_ends_with_a_mark() -> None:
    ok, broken = factory.result("naive", "int4")[0], factory.result("naive", "int4", seed=1, status="diverged")[0]
    series = {ok.run_id: {"x": [1.0] * 5}, broken.run_id: {"x": [2.0, 7.0, np.nan]}}
    assert over_steps(arm_of(ok, broken), series, "x").ends == ((2.0, 7.0),)
    last = max(broken.evals, key=lambda record: record.step)
    assert over_evaluations(arm_of(ok, broken), last.site).ends == ((20.0, last.accuracy),)


def test_over_evaluations_is_the_mean_over_seeds() -> None:
    arm, results = two_seeds()
    band = over_evaluations(arm, "rollout")
    assert band.x.tolist() == [0, 20, 40, 60, 80]
    values = np.array([[r.accuracy for r in run.evals if r.site == "rollout"] for run in results], dtype=np.float64)
    np.testing.assert_allclose(band.middle, values.mean(axis=0))
    np.testing.assert_allclose(band.high, values.max(axis=0))


def test_a_profile_weighs_steps_by_their_tokens() -> None:
    arm, (a, b) = two_seeds()
    columns = {
        "by_position/position": [[0.0, 1.0], [0.0, 1.0, 2.0]],
        "by_position/k3": [[1.0, 5.0], [4.0, np.nan, 7.0]],
        "by_position/count": [[10.0, 10.0], [20.0, 0.0, 1.0]],
    }
    band = over_profile(arm, {a.run_id: columns}, "by_position", "position", "k3")
    assert band.x.tolist() == [0, 1, 2] and band.middle.tolist() == [3, 5, 7]
    assert len(over_profile(arm, {b.run_id: {"reward/mean": [1.0]}}, "by_position", "position", "k3").x) == 0


def drawn(ax: Any, colour: str) -> list[np.ndarray]:
    """y data of the lines of a colour, crosses left out."""
    lines = [np.array(line.get_xydata())[:, 1] for line in ax.lines if to_rgb(line.get_color()) == to_rgb(colour)]
    return [values for values in lines if len(values) > 1]


def test_panels_hold_their_data_and_the_control() -> None:
    pairs = factory.sweep_results(MANY, seeds=2)
    arms = group_arms([result for result, _ in pairs])
    looks = looks_of(arms, "bf16")
    with mpl.rc_context(fname=STYLE):
        figure = small_multiples(
            arms, lambda arm: over_evaluations(arm, "reference"), "x", "y", looks=looks, control="bf16"
        )
    assert figure is not None
    axes = {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}
    assert list(axes) == ["bf16", "int8", "fp8_block", "nvfp4", "int4", "int3"]
    control = next(arm for arm in arms if arm.method == "bf16")
    for ax in axes.values():
        np.testing.assert_array_equal(drawn(ax, INK), [over_evaluations(control, "reference").middle])
    for arm in arms:
        expected = over_evaluations(arm, "reference").middle
        assert any(np.array_equal(line, expected) for line in drawn(axes[arm.precision], looks[style_name(arm)].colour))
    assert [text.get_text() for text in figure.legends[0].texts][:2] == ["bf16", "bf16_tis"]
    assert len(figure.legends[0].texts) == len(looks)


def test_looks_differ_in_colour_and_in_grey_and_stay_the_same_between_sweeps() -> None:
    few, many = (
        looks_of(group_arms([r for r, _ in factory.sweep_results(a, 1)]), "bf16") for a in (factory.QUICK, MANY)
    )
    for name in ("bf16", "naive", "flashrl", "naive bypass_ppo"):
        assert few[name] == many[name]
    assert len({look.colour for look in many.values()}) == len(many)
    assert len({look.marker for look in many.values()}) == len(many)
    assert len({str(look.dash) for look in many.values()}) >= len(many) - 1  # the control and TIS are solid


def test_a_logarithmic_panel_says_what_is_exactly_zero() -> None:
    results = [factory.result()[0], factory.result("zero_mismatch")[0]]
    arms = group_arms(results)
    series = {results[0].run_id: {"k": [1e-4, 2e-4]}, results[1].run_id: {"k": [0.0, 0.0]}}
    figure = small_multiples(
        arms,
        lambda arm: over_steps(arm, series, "k"),
        "x",
        "y",
        looks=looks_of(arms, "bf16"),
        control="bf16",
        is_log=True,
    )
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == ["zero_mismatch: exactly 0"]
    assert small_multiples(arms, lambda arm: over_steps(arm, {}, "k"), "x", "y", looks={}, control="bf16") is None


def test_scores_stand_side_by_side() -> None:
    results = [result for result, _ in factory.sweep_results(seeds=2)]
    arms, board = group_arms(results), {str(r["arm"]): r for r in leaderboard(results).to_dict("records")}
    (ax,) = scores(arms, board, "bf16").axes
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["bf16  bf16", "int8  naive"]
    dots = [np.array(line.get_xydata()) for line in ax.lines if len(np.array(line.get_xydata())) == 1]
    points = {(round(float(dot[0, 1])), float(dot[0, 0])) for dot in dots}
    for y, arm in enumerate(arms):
        for column in ("accuracy", "rollout_accuracy", "reward"):
            assert (y, board[arm.label][column]) in points


def test_an_arm_with_fewer_bases_than_others_says_so() -> None:
    results = [result for result, _ in factory.sweep_results(seeds=2)]
    results = [r for r in results if (r.method.name, r.seed) != ("naive", 1)]
    arms, board = group_arms(results), {str(r["arm"]): r for r in leaderboard(results).to_dict("records")}
    (ax,) = scores(arms, board, "bf16").axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[:2] == ["bf16  bf16", "int8  naive, 1 of 2 bases"]
    assert all("bases" not in name for name in names if "naive" not in name)
    assert step_label("mean", arms) == "policy step (mean, and all seeds as a band; some arms lack bases)"
    assert step_label("mean", arms[:1]) == "policy step (mean, and all seeds as a band)"


def test_the_overview_focuses_on_the_precision_with_most_arms() -> None:
    pairs = factory.sweep_results(MANY, seeds=1)
    figure = laid_out_overview(pairs)
    left, top, bottom = figure.axes
    assert "int4" in top.get_title(loc="left")
    assert len(top.lines) == len(bottom.lines) == 5
    assert bottom.get_yscale() == "log"
    for legend, ax in zip(figure.subfigs[0].legends + figure.subfigs[1].legends, (left, top), strict=True):
        assert legend.get_window_extent().y0 >= ax.get_window_extent().y1, "legend over the data"


def test_tis_has_a_curve_where_it_is_the_worst() -> None:
    methods = ("naive", "flashrl", "mis", "icepop", "opsm", "qurl", "tis_token")
    names = [factory.QUICK[0], *((name, "int4", "decoupled") for name in methods)]
    results = [result for result, _ in factory.sweep_results(names, seeds=1)]
    arms, board = group_arms(results), {str(r["arm"]): r for r in leaderboard(results).to_dict("records")}
    for rank, name in enumerate(methods):
        board[f"{name} int4"]["auc"] = 0.1 * (rank if name != "flashrl" else -1)
    shown = [arm.method for arm in lines_of(arms, board, "bf16")]
    assert sorted(shown) == ["bf16", "flashrl", "naive", "qurl", "tis_token"]


def test_a_figure_says_how_many_arms_have_no_curve(tmp_path: Path) -> None:
    """Curves of the control, and of seven arms at int4 those of the uncorrected one, of TIS and of the two best."""
    methods = ("naive", "flashrl", "mis", "icepop", "opsm", "qurl", "tis_token")
    few, many = (
        factory.sweep_results([factory.QUICK[0], *((name, "int4", "decoupled") for name in names)], seeds=1)
        for names in (methods[:4], methods)
    )
    said = "not drawn: 3 of 8 arms, see the sweep's table"
    for pairs, is_said in ((few, False), (many, True)):
        _, top, bottom = laid_out_overview(pairs).axes
        assert len(top.lines) == 5 and bottom.get_xlabel().endswith(said) == is_said
        assert ("not drawn" in bottom.get_xlabel()) == is_said
        folder = tmp_path / str(is_said)
        write(folder, pairs)
        for path in draw(folder, formats=("svg",)):
            has_curves = path.stem not in ("scores", "profiles")
            assert (said in path.read_text(encoding="utf-8")) == (is_said and has_curves), path


def test_legends_of_long_names_stay_in_their_half() -> None:
    knobs = [{"AQN": {"allow_rounded_noise": i == 1, "sigma_start": 0.05 if i == 2 else 0.01}} for i in range(3)]
    pairs = [
        factory.result(),
        *(factory.result("qerl", "nvfp4", knobs=k) for k in knobs),
        factory.result("qerl_no_aqn", "nvfp4"),
    ]
    figure = laid_out_overview(pairs)
    left, right = (half.legends[0].get_window_extent() for half in figure.subfigs)
    edges = [0.0, left.x0, left.x1, right.x0, right.x1, figure.bbox.width]
    assert edges == sorted(edges)


def test_the_steps_of_a_very_short_run_are_whole_numbers() -> None:
    pairs = [(r, rows[:2]) for r, rows in (factory.result(), factory.result("naive", "int4"))]
    pairs = [(r.model_copy(update={"evals": [e for e in r.evals if e.step == 0]}), rows) for r, rows in pairs]
    _, _, bottom = laid_out_overview(pairs).axes
    assert bottom.get_xlim()[1] < 3 and all(float(tick).is_integer() for tick in bottom.get_xticks())


def laid_out_overview(pairs: Sequence[tuple[RunResult, list[dict[str, Any]]]]) -> Figure:
    """The overview of runs and their series, with everything in its place."""
    results = [result for result, _ in pairs]
    arms = group_arms(results)
    board = {str(r["arm"]): r for r in leaderboard(results).to_dict("records")}
    with mpl.rc_context(fname=STYLE):
        figure = overview(arms, {r.run_id: _columns(s) for r, s in pairs}, board, looks_of(arms, "bf16"), "bf16")
        figure.draw_without_rendering()
    return figure


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def write(folder: Path, pairs: list[tuple[RunResult, list[dict[str, Any]]]]) -> None:
    for result, series in pairs:
        write_result(folder / "runs" / "quick", result, series)


def draw(folder: Path, **options: Any) -> list[Path]:
    """Every figure of what `write` wrote into a folder, in `out` beside it."""
    runs = folder / "runs" / "quick"
    return draw_all(board_of(read_results(runs)), runs, folder / "out", **options)


def test_draw_all(tmp_path: Path) -> None:
    pairs = factory.sweep_results((*factory.QUICK[:2], factory.QUICK[5]), seeds=3)
    write(
        tmp_path,
        [*pairs, factory.result("naive", "int3", status="failed"), factory.result("mis", "int4", status="diverged")],
    )
    paths = draw(tmp_path)
    names = [
        "overview",
        "scores",
        "accuracy",
        "deployed",
        "reward",
        "mismatch",
        "mismatch_position",
        "mismatch_entropy",
        "profiles",
    ]
    assert paths == [tmp_path / "out" / f"{name}.png" for name in names]
    for path in paths:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert width == {"overview": 1480, "profiles": 1000}.get(path.stem, 1350) and 300 < height < 1500
    pixels = mpl.image.imread(paths[0])  # pyright: ignore[reportAttributeAccessIssue]
    assert 0.005 < np.mean(pixels[..., :3].min(axis=-1) < 0.5) < 0.3
    before = paths[2].read_bytes()
    draw(tmp_path)
    assert paths[2].read_bytes() == before


def test_one_set_per_context(tmp_path: Path) -> None:
    write(tmp_path, [factory.result(task__n=n, seed=s) for n in (8, 16) for s in range(2)])
    names = {path.name for path in draw(tmp_path, formats=("svg",))}
    assert {"accuracy-n8.svg", "accuracy-n16.svg"} <= names and len(names) == 16


def test_many_contexts_have_one_heat_map_and_an_overview_each(tmp_path: Path) -> None:
    places = [(size, n) for size in ("xs", "s") for n in (8, 16)]
    write(tmp_path, [factory.result(model__name=size, task__n=n) for size, n in places])
    paths = draw(tmp_path, formats=("svg",), overview=draw_grid)
    assert paths[0].name == "grid.svg"
    assert {path.stem.split("-")[0] for path in paths[1:]} == {"overview", "accuracy", "deployed"} and len(paths) == 13


def test_figures_that_a_sweep_has_outgrown_are_removed_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("reward-n8.png", "grid.png", "overview.svg", "profiles-n8.png", "mine.png", "reward.txt"):
        (out / name).write_text("of before")
    write(tmp_path, factory.sweep_results(factory.QUICK[:2], seeds=1))
    drawn = draw(tmp_path)
    left = {path.name for path in out.iterdir()} - {path.name for path in drawn}
    assert left == {"overview.svg", "mine.png", "reward.txt"}


def test_nothing_but_failures_is_drawn_empty(tmp_path: Path) -> None:
    write(tmp_path, [factory.result(status="failed")])
    assert [path.stem for path in draw(tmp_path)] == ["overview", "scores"]
    assert load_series(tmp_path / "runs" / "quick", [factory.result(status="failed")[0]]) == {}
