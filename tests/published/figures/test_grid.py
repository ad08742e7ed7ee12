"""Around the paper figures: estimates over seeds, the grid of a sweep, `lowbit figures` and what it lacks."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from harness.cli.figures import figures, listing
from harness.published.figures import FIGURES, draw, missing
from harness.published.figures.drawn import folded, png
from harness.published.figures.estimates import bracketed, difference, floored, fraction, geometric, mean, ratio
from harness.published.figures.grid import draw_grid, places_of
from harness.records.arms import Arm, group_arms
from harness.records.packed import pack
from tests.arm_factory import Runs, run, write


def test_estimates_by_hand() -> None:
    a, b = {(0, 0): 1.0, (1, 1): 4.0, (2, 2): 9.0}, {(0, 0): 2.0, (1, 1): 2.0}
    assert mean(b).value == 2.0 and (mean(b).low, mean(b).high) == (2.0, 2.0)
    assert difference(a, b).value == pytest.approx(0.5) and difference(a, b).seeds == 2
    assert ratio(a, b).value == pytest.approx(1.0)  # sqrt(0.5 * 2)
    assert geometric(a).value == pytest.approx(36 ** (1 / 3))
    assert geometric({(0, 0): 0.0, (1, 1): 5.0}).seeds == 1
    assert (fraction({(0, 0): 0.0, (1, 1): 0.5}).low, fraction({(0, 0): 0.0, (1, 1): 0.5}).high) == (0.0, 1.0)
    assert floored({(0, 0): 1e-9, (1, 1): 1.0}) == {(0, 0): 1e-6, (1, 1): 1.0}
    # t of one degree of freedom at 97.5 % is 12.7062; values 0 and 2 have a standard error of 1
    wide = mean({(0, 0): 0.0, (1, 1): 2.0})
    assert (wide.low, wide.high) == (pytest.approx(1 - 12.7062, abs=1e-3), pytest.approx(1 + 12.7062, abs=1e-3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((0.1234, math.nan, math.nan), "0.123"),
        ((-0.02, -0.05, 0.0004), "-0.020 [-0.050, 0.000]"),
        ((1.5, 1.25, 2.0), "1.50 [1.25, 2.00]"),
        ((99.2, 88.2, 112.0), "99 [88, 112]"),
        ((3e-5, 2e-5, 4e-5), "3.0e-05 [2.0e-05, 4.0e-05]"),
        ((0.0, math.nan, math.nan), "0.000"),
        ((math.nan, math.nan, math.nan), "-"),
    ],
)
def test_numbers_for_reading(value: tuple[float, float, float], text: str) -> None:
    assert bracketed(*value) == text


def test_folded_joins_bounds_to_their_value(tmp_path: Path) -> None:
    drawn = draw("fp16_mismatch", write(tmp_path, run("fp16", "bf16") + run("fp16", "fp16", "fp16", auc=0.8)))
    assert png(drawn.figure) == png(drawn.figure)
    table = folded(drawn.numbers)
    assert "AUC - bf16" in table and "AUC - bf16_low" not in table
    assert table["AUC - bf16"][1] == "0.100 [0.100, 0.100]" and table["seeds"][0] == 2


def _once(arm: Arm) -> Arm:
    return replace(arm, runs=arm.runs[:1])


def test_the_grid_of_emulated_formats_has_no_map_of_speed() -> None:
    runs: Runs = []
    for size in ("xs", "s"):
        for n in (8, 16):
            place = {"model__name": size, "task__n": n}
            runs += run("grid", "bf16", auc=0.8, speed=1e4, **place)
            for method, gap in (("naive", 0.3), ("flashrl", 0.1), ("qurl", 0.05)):
                runs += run("grid", method, "int4", auc=0.8 - gap, speed=5e3, k3=(0.02, 0.02), **place)
    arms = group_arms([result for result, _ in runs])
    assert places_of(arms) == [("xs", 8), ("s", 8), ("xs", 16), ("s", 16)]
    figure = draw_grid(arms, "bf16")
    assert figure is not None
    k3, auc = (np.ma.getdata(ax.images[0].get_array()) for ax in figure.axes)
    assert k3.shape == (4, 4) and [t.get_text() for t in figure.axes[0].get_yticklabels()][:2] == [
        "bf16  bf16", "int4  naive"
    ]  # fmt: skip
    np.testing.assert_allclose(k3[1:], 0.02 * math.sqrt(2))
    np.testing.assert_allclose(auc[1:, 3], [-0.3, -0.1, -0.05])
    assert np.isnan(auc[0]).all()
    words = [text for text in figure.axes[1].texts if text.get_text() == "-.30"]
    assert len(words) == 4 and all(text.get_fontweight() == "bold" for text in words)
    assert figure.get_suptitle() == (
        "int4 naive loses most against bf16 (-0.30, size s, n=8);\nint4 loses least (-0.30 at worst)"
    )
    assert draw_grid([arm for arm in arms if arm.fields["task.n"] == 8], "bf16") is None
    elsewhere = [replace(arm, variant="" if arm.fields["task.n"] == 8 else "lr=1") for arm in arms]
    assert draw_grid(elsewhere, "bf16") is None, "usual arms ran at one length alone"
    text = replace(arms[0], fields=arms[0].fields | {"model.name": "hf", "task.n": None})
    with_text, once = draw_grid([*arms, text], "bf16"), draw_grid([_once(arm) for arm in arms], "bf16")
    assert with_text is not None and once is not None
    assert len(with_text.axes[0].get_xticks()) == len(once.axes[0].get_xticks()), "a text task has no size n"
    assert with_text.get_supxlabel().endswith(" n, 2 seeds. Bold: the 95 % interval leaves out 0.")
    assert once.get_supxlabel().endswith(" n, 1 seed. Bold: the 95 % interval leaves out 0.")


def test_a_packed_sweep_gives_the_same_figure(tmp_path: Path) -> None:
    columns = {"mismatch/logp_absdiff_max": 0.3}
    write(tmp_path, run("fp16", "bf16", columns=columns) + run("fp16", "fp16", "fp16", k3=(1e-6, 1e-5), auc=0.8))
    own = draw("fp16_mismatch", tmp_path)
    pack(tmp_path, "fp16")
    shutil.rmtree(tmp_path / "runs")
    packed = draw("fp16_mismatch", tmp_path)
    assert not (tmp_path / "runs").exists()
    assert own.says == packed.says
    pd.testing.assert_frame_equal(own.numbers, packed.numbers, rtol=1e-6)  # packed series are float32
    (tmp_path / "packed" / "fp16.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"fp16\.zip: not a packed sweep"):
        draw("fp16_mismatch", tmp_path)


def test_what_is_missing_is_said_with_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for figure in FIGURES.values():
        assert "`lowbit " in missing(figure, tmp_path)
    assert figures([], tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FIGURES) and all(line.startswith("skipped  ") for line in lines)
    assert "skipped  qat_start: sweep ablate_qat has no results; `lowbit sweep ablate_qat`" in lines
    with pytest.raises(ValueError, match="ablate_qat has no results"):
        draw("qat_start", tmp_path)
    with pytest.raises(ValueError, match="qurl_clip"):
        draw("qurl_clips", tmp_path)


def test_the_command_draws_what_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run("fp16", "bf16") + run("fp16", "fp16", "fp16", auc=0.8))
    write(tmp_path, run("length", "naive", "int8"))
    assert figures([], tmp_path) == 0
    out = capsys.readouterr().out
    paper = tmp_path / "figures" / "paper"
    assert {path.name for path in paper.iterdir()} == {"fp16_mismatch.png", "fp16_mismatch.csv"}
    assert "skipped  jet_rl_length: sweep 'length' has no scored run" in out  # it has no bf16
    folder = tmp_path / "throughput" / "throughput_h200"
    assert f"skipped  flashrl_throughput: no rates in {folder}; `lowbit throughput throughput_h200`" in out
    before = (paper / "fp16_mismatch.png").read_bytes()
    assert figures(["fp16"], tmp_path) == 0 and (tmp_path / "figures" / "fp16" / "overview.png").is_file()
    assert (paper / "fp16_mismatch.png").read_bytes() == before
    with pytest.raises(ValueError, match="'length' has no scored run"):
        figures(["jet_rl_length"], tmp_path)
    with pytest.raises(ValueError, match="flashrl_throughput: no rates in"):
        draw("flashrl_throughput", tmp_path)
    with pytest.raises(ValueError, match="'fp61' is no paper figure and no sweep with results; nearest: fp16"):
        figures(["fp61"], tmp_path)
    capsys.readouterr()
    assert listing(tmp_path) == 0
    assert "fp16_mismatch        FP16" in capsys.readouterr().out


def test_runs_of_one_base_enter_a_difference_by_their_mean() -> None:
    """The interval is scipy's over bases, whatever the number of the control's runs; a base of one side is left out."""
    arm = {(0, 0): 0.52, (1, 0): 0.71, (2, 0): 0.60, (3, 0): 0.9}
    control = {(base, seed): 0.5 + 0.05 * base + 0.02 * seed for base in range(3) for seed in range(3)}
    means = [0.52 + 0.05 * base for base in range(3)]
    gaps = [arm[base, 0] - means[base] for base in range(3)]
    expected = ttest_1samp(gaps, 0.0).confidence_interval()
    got = difference(arm, control)
    assert (got.value, got.low, got.high, got.seeds) == pytest.approx((sum(gaps) / 3, *expected, 3), abs=1e-12)
    one = difference({(0, 0): 0.5}, {(0, 0): 0.25})
    assert one.value == 0.25 and math.isnan(one.low) and one.seeds == 1
