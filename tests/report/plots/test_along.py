"""The figure of dials: gaps to the control on the same base, line by line, and a title that says what is lost."""

from __future__ import annotations

import pytest

from harness.records.arms import group_arms
from harness.report.plots.along import _looks, along, found_along, lines_along, lines_over_lengths
from harness.report.plots.style import looks_of_names
from tests import arm_factory as factory

STALE = "algo.staleness"


def arms(*runs: factory.Runs) -> list:
    return group_arms([record for arm in runs for record, _ in arm])


def stale() -> list:
    """Two bases an arm; each arm moves with its base by the same amount, so that its gaps are equal."""
    return arms(
        factory.run("x", "bf16", auc=0.7),
        factory.run("x", "bf16", auc=0.1, algo__staleness=16),
        factory.run("x", "flashrl", "int8", auc=0.69),
        factory.run("x", "flashrl", "int8", auc=0.65, algo__staleness=16),
        factory.run("x", "naive", "int8", auc=0.64),
        factory.run("x", "naive", "int8", auc=0.72, algo__num_minibatches=4),
    )


def test_a_gap_is_to_the_plain_control_on_the_same_base() -> None:
    lines = lines_along(stale(), STALE, "bf16")
    assert set(lines) == {
        ("bf16", "bf16"),
        ("int8", "flashrl"),
    }  # naive has no old rollouts: its updates are another dial
    assert lines["bf16", "bf16"] == {0.0: pytest.approx((0.0, 0.0)), 16.0: pytest.approx((-0.6, -0.6))}
    assert lines["int8", "flashrl"] == {0.0: pytest.approx((-0.01, -0.01)), 16.0: pytest.approx((-0.05, -0.05))}
    updates = lines_along(stale(), "algo.num_minibatches", "bf16")
    assert list(updates["int8", "naive"].values()) == [pytest.approx((-0.06, -0.06)), pytest.approx((0.02, 0.02))]


def test_without_a_plain_control_the_one_with_most_arms_beside_it_stands_for_it() -> None:
    """Most arms have spread channels and make two updates; of the others the control makes one or sixteen."""
    one = {"algo__num_minibatches": 1, "model__spread": 0.0}
    every = arms(
        factory.run("x", "bf16", auc=0.7, **one),
        factory.run("x", "bf16", auc=0.1, algo__staleness=16, **one),
        factory.run("x", "naive", "int8", auc=0.6, **one),
        factory.run("x", "naive", "int8", auc=0.2, algo__staleness=16, **one),
        factory.run("x", "bf16", auc=0.8, **one | {"algo__num_minibatches": 16}),
        *(factory.run("x", name, "int8", algo__num_minibatches=2) for name in ("bf16", "naive", "mis", "trm", "opsm")),
        factory.run("x", "flashrl", "int8", algo__num_minibatches=2),
    )
    own = [arm for arm in every if arm.context["model.spread"] == 0]
    assert len(own) == 5 and all(arm.variant for arm in own)
    lines = lines_along(own, STALE, "bf16")
    assert lines["bf16", "bf16"] == {0.0: pytest.approx((0.0, 0.0)), 16.0: pytest.approx((-0.6, -0.6))}
    assert lines["int8", "naive"] == {0.0: pytest.approx((-0.1, -0.1)), 16.0: pytest.approx((-0.5, -0.5))}


def test_an_arm_with_another_rate_as_well_is_on_no_line() -> None:
    """No axis of the arms names the rate, since the updates tell them apart already."""
    runs = [factory.run("x", method, auc=0.7) for method in ("bf16", "bf16_tis")]
    both = factory.run("x", "bf16", auc=0.5, algo__num_minibatches=16, trainer__lr=2e-4)
    assert "trainer.lr" not in arms(*runs, both)[0].axes
    assert lines_along(arms(*runs, both), "algo.num_minibatches", "bf16") == {}
    alone = factory.run("x", "bf16", auc=0.5, algo__num_minibatches=16)
    assert list(lines_along(arms(*runs, alone), "algo.num_minibatches", "bf16")) == [("bf16", "bf16")]


def test_a_base_without_a_control_is_left_out() -> None:
    control, other = factory.run("x", "bf16", seeds=1), factory.run("x", "bf16", auc=0.3, seeds=3, algo__staleness=8)
    (line,) = lines_along(arms(control, other), STALE, "bf16").values()
    assert [len(gaps) for gaps in line.values()] == [1, 1]
    assert lines_along(arms(control), STALE, "bf16") == {}
    assert lines_along(arms(other), STALE, "bf16") == {}


def test_a_base_of_more_runs_counts_once() -> None:
    control = factory.run("x", "bf16", auc=0.7, seeds=2)
    other = factory.run("x", "bf16", auc=0.3, seeds=2, algo__staleness=8)
    more = [(record.model_copy(update={"run_id": f"{record.run_id}a", "seed": 9}), rows) for record, rows in other[:1]]
    (once,) = lines_along(arms(control, other), STALE, "bf16").values()
    (twice,) = lines_along(arms(control, other, more), STALE, "bf16").values()
    assert len(arms(control, other, more)[-1].runs) == 3 and twice[8.0] == pytest.approx(once[8.0])


def test_the_title_names_what_is_lost_at_the_last_value() -> None:
    lines = lines_along(stale(), STALE, "bf16")
    loss, words = found_along(lines, STALE)
    assert loss == pytest.approx(0.6)
    assert words == "At staleness 16 bf16 bf16 loses 0.60; the other differs by -0.05"
    near = lines | {("bf16", "bf16"): {16.0: (0.02,)}}
    assert found_along(near, STALE)[1] == "At staleness 16 both lines differ by -0.05 to +0.02"
    del lines["bf16", "bf16"]
    assert found_along(lines, STALE)[1] == "At staleness 16 the one line differs by -0.05"
    assert found_along(lines, STALE, "n=8")[1].startswith("At staleness 16 (n=8) the one line")
    lines["int4", "naive"] = {16.0: (-0.3, -0.1)}
    lines["int4", "mis"] = {16.0: (0.02,)}
    assert found_along(lines, STALE)[1] == (
        "At staleness 16 int4 naive loses 0.20; the other 2 differ by -0.05 to +0.02"
    )


def test_every_line_is_drawn_in_the_panel_of_its_dial() -> None:
    figure = along(stale(), "bf16")
    assert figure is not None
    ax, other = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["age of the rollouts, steps", "updates a batch"]
    assert [text.get_text() for text in other.get_xticklabels()] == ["1", "4"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "16"]
    drawn = [line for line in ax.lines if line.get_linestyle() not in ("None", "")][:2]
    assert [list(line.get_ydata()) for line in drawn] == [pytest.approx([0.0, -0.6]), pytest.approx([-0.01, -0.05])]
    assert [list(line.get_xdata()) for line in drawn] == [[-0.25, 0.75], [0.25, 1.25]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "bf16 bf16", "int8 flashrl", "int8 naive"
    ]  # fmt: skip
    assert along(arms(factory.run("x", "bf16"), factory.run("x", "naive", "int8")), "bf16") is None


def test_methods_of_a_panel_differ_in_colour_and_formats_in_filling() -> None:
    """As many methods as the largest committed figure has, three of which have looks of their own, at six formats."""
    methods = ("flashrl", "naive", "naive bypass_ppo", "icepop", "m2po", "mis", "opsm", "trm", "vespo", "bf16_tis")
    formats = ("bf16", "int8", "fp8_block", "fp8_block+kv8", "nvfp4", "int4")
    looks = _looks(
        [("bf16", "bf16"), *((p, m) for p in formats for m in methods)], looks_of_names(["bf16", *methods], "bf16")
    )
    colours = {name: {look.colour for (_, of), look in looks.items() if of == name} for name in ("bf16", *methods)}
    assert all(len(found) == 1 for found in colours.values()) and len(set().union(*colours.values())) == 11
    fills = {name: {look.fill for (of, _), look in looks.items() if of == name} for name in formats}
    assert list(fills.values()) == [{"full"}, {"none"}, {"left"}, {"top"}, {"right"}, {"bottom"}]
    assert len({(look.colour, look.marker, look.fill) for look in looks.values()}) == 61


def lengths() -> list:
    """Two lengths of two bases; the control has 0.7 and 0.5, uncorrected INT8 loses 0.01 and 0.3 of it."""
    return arms(
        factory.run("x", "bf16", auc=0.7, task__n=10),
        factory.run("x", "bf16", auc=0.5, task__n=30, base__max_steps=9),
        factory.run("x", "naive", "int8", auc=0.69, task__n=10),
        factory.run("x", "naive", "int8", auc=0.2, task__n=30, base__max_steps=9),
        factory.run("x", "flashrl", "int8", auc=0.2, task__n=30, base__max_steps=9),
    )


def test_a_length_is_compared_with_the_control_of_this_length() -> None:
    assert lines_over_lengths(lengths(), "bf16") == {
        "": {("int8", "naive"): {10.0: pytest.approx((-0.01, -0.01)), 30.0: pytest.approx((-0.3, -0.3))}}
    }
    figure = along(lengths(), "bf16")
    assert figure is not None
    (ax,) = figure.axes
    assert ax.get_xlabel() == "size of the problems, n" and "usual" not in figure.get_supylabel()
    assert [text.get_text().split("\n")[0] for text in ax.get_xticklabels()] == ["10", "30"]
    assert list(ax.lines[0].get_xdata()) == list(ax.get_xticks()), "a line alone stands above its values"
    assert found_along(lines_over_lengths(lengths(), "bf16")[""], "task.n")[1] == "At n=30 int8 naive loses 0.30"


def test_lengths_that_differ_in_more_are_on_no_line() -> None:
    pairs = (("bf16", "bf16"), ("naive", "int8"))
    runs = [factory.run("x", m, p, task__n=n, trainer__lr=n * 1e-5) for m, p in pairs for n in (4, 10)]
    assert lines_over_lengths(arms(*runs), "bf16") == {} and along(arms(*runs), "bf16") is None
