"""The figure of single bases: its points by hand, and a title that counts the runs that fell."""

from __future__ import annotations

import pytest
from matplotlib.lines import Line2D

from harness.records.arms import group_arms
from harness.records.run_result import base_names
from harness.report.plots.bases import bases, runs_of, title
from harness.report.plots.style import looks_of
from tests import arm_factory as factory


def arms(fallen: float, seeds: int = 4) -> list:
    runs = [
        factory.run("x", "bf16", auc=0.7, seeds=seeds),
        factory.run("x", "flashrl", "int8", auc=0.69, seeds=seeds),
        factory.run("x", "naive", "int8", auc=fallen, seeds=seeds),
        factory.run("x", "naive", "int4", auc=0.6, seeds=seeds),
    ]
    return group_arms([record for arm in runs for record, _ in arm])


def test_a_point_is_a_run_and_formats_of_a_method_stand_together() -> None:
    found = runs_of(arms(0.01))
    assert {name: len(runs) for name, runs in found.items()} == {"bf16": 4, "flashrl": 4, "naive": 8}
    assert [run.has_collapsed for _, run in found["naive"]] == [True] * 4 + [False] * 4
    assert found["bf16"][0][1].value == pytest.approx(0.7, abs=0.05)
    assert title(found) == "Runs that collapse: 4 of 8 naive, 0 of 4 bf16, 0 of 4 flashrl"
    more = found | {"icepop": found["bf16"], "trm": found["bf16"][:3]}
    assert title(more) == "Runs that collapse: 4 of 8 naive; 0 of 15 with 4 others"


def test_the_figure_holds_every_run_hollow_where_it_fell_and_is_left_out_where_none_did() -> None:
    given = arms(0.01)
    figure = bases(given, looks_of(given, "bf16"))
    assert figure is not None
    drawn = [line for line in figure.axes[0].get_lines() if isinstance(line, Line2D) and line.get_linestyle() == "None"]
    assert len(drawn) == 16 and [line.get_fillstyle() for line in drawn].count("none") == 4
    names = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert names == base_names(sorted({base for base, _ in runs_of(given)["bf16"]})) and len(names) == 4
    assert bases(arms(0.6), looks_of(given, "bf16")) is None
    assert bases(arms(0.01, seeds=3), looks_of(given, "bf16")) is None
