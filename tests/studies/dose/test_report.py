"""The page and the figure of the study: numbers of the study itself, no more and no fewer rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from harness.foundation.provenance import ROOT
from harness.studies.dose import figure as figures
from harness.studies.dose.curve import bins
from harness.studies.dose.points import curve_points, read_all_points
from harness.studies.dose.report import page, sentences, write
from harness.studies.dose.study import MIN_RUNS, TASK, Study, finding, prediction, study
from tests.studies.dose import made


@cache
def known() -> Study:
    others = [
        made.point(loss, 1.0, base, task="wordmath", precision="int8") for loss, base in ((-0.01, "w"), (0.05, "v"))
    ]
    return study([*made.cloud(24, noise=0.02, bumps=0.1), *others])


def test_the_sentences_tell_the_numbers() -> None:
    said = sentences(known())
    ratio = next(r for r in known().reached if r.correction == "TIS" and r.loss == 0.1)
    assert said[0] == f"{finding(known())}. Brackets: 95 %, bases resampled."
    assert any(f"TIS bears {ratio.ratio:.1f} times the dose [{ratio.ratio_low:.1f}, " in line for line in said)
    (added,) = [line for line in said if line.startswith("Beyond the dose, no correction")]
    assert "format adds (p = " in added and "at int4)" in added and "not shown for" in added


def test_few_bases_give_the_dose_of_a_loss_no_interval() -> None:
    """Resampled bases: the range of five holds their median in 94 % of cases, so six are the fewest."""
    for num, has_interval in ((5, False), (6, True)):
        s = study(made.cloud(num))
        (row,) = [r for r in s.reached if (r.correction, r.loss) == ("TIS", 0.1)]
        ends = (row.low, row.high, row.ratio_low, row.ratio_high)
        assert [not math.isnan(end) for end in ends] == [has_interval] * 4
        assert ("[" in finding(s)) == has_interval and "nan" not in page(s)
        told = f"TIS bears {row.ratio:.1f} times the dose{'' if not has_interval else ' ['}"
        assert any(line.startswith(told) for line in sentences(s))
        assert any(line.endswith(" before it loses 0.1.") for line in sentences(s))


def test_the_page_has_every_row() -> None:
    s, text = known(), page(known())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    heads = 5
    assert len(rows) == heads + len(s.bins) + len(s.reached) + 2 * 4 + sum(len(c) for c in s.candidates.values()) + 1
    curve = prediction(s, s.others[0].correction, s.others[0].dose)
    assert 0.15 < curve < 0.3
    assert rows[-1] == f"| wordmath | none | int8 | 2 | +0.020 | -0.010 | +0.050 | {curve:+.3f} |"
    assert text.startswith("# Dose: lost accuracy against mismatch x length\n\n192 runs of `sort` on 24 bases")
    for b in s.bins:
        assert f"| {b.correction} | {b.name} | {b.dose:.2g} | {b.num_runs} | {b.num_bases} | {b.loss:+.3f}" in text


def test_kinds_of_dose_have_their_tables_and_sentence() -> None:
    rows = made.cloud(24)
    stale = [replace(p, loss=p.loss + 0.1, kind="staleness", run_id=f"{p.run_id} s") for p in rows]
    s = study([*rows, *stale])
    k = s.kinds["sort", "none"][1]
    assert k.beyond == pytest.approx(0.1, abs=0.01)
    text = page(s)
    assert f"| sort | none | staleness | {k.dose:.2g} | 96 | 24 | 0 | {k.loss:+.3f} | {k.beyond:+.3f} [" in text
    assert "| sort | TIS | kind | 2 | 192 | 24 |" in text and "## Kinds of dose" not in page(known())
    assert any(
        line.startswith(
            f"Loss beyond that of formats at an equal dose, sort, no correction: staleness {k.beyond:+.3f} ["
        )
        for line in sentences(s)
    )


def test_runs_that_all_lose_the_same_explain_nothing(tmp_path: Path) -> None:
    """No variance: no share of it, no test, and no division by zero."""
    even = study([replace(point, loss=0.1) for point in made.cloud()])
    for found in even.additions.values():
        assert all(math.isnan(x) for a in found for x in (a.r2_dose, a.r2_both, a.p, a.p_holm))
    for found in even.candidates.values():
        assert all(math.isnan(c.r2) and abs(c.rmse) < 1e-12 for c in found)
    text = page(even)
    assert "no correction: nothing adds that these runs show" in text and "nan" not in text
    assert len(write(even, tmp_path, tmp_path)) == 2


def test_the_figure_shows_the_finding_and_every_run(tmp_path: Path, monkeypatch) -> None:
    drawn: list[Figure] = []
    whole = figures._figure
    monkeypatch.setattr(figures, "_figure", lambda s: drawn.append(whole(s)) or drawn[-1])
    paths = write(known(), tmp_path / "tables", tmp_path / "figures")
    assert [path.name for path in paths] == ["dose_curve.md", "dose_curve.png"]
    assert all(path.stat().st_size for path in paths)
    (figure,) = drawn
    assert " ".join(figure.get_suptitle().split()) == finding(known())
    above = figure.axes[:2]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in above] == ["no correction", "TIS"]
    for ax, name in zip(above, ("none", "TIS"), strict=True):
        shown = sum(
            np.size(line.get_xdata()) for line in ax.lines if line.get_label() in ("emulated", "vLLM's kernels")
        )
        assert shown == sum(p.correction == name for p in known().points)
        assert (ax.get_xscale(), figure.axes[0].get_ylabel()) == ("log", "lost accuracy")


def test_the_figure_has_one_mark_for_every_amount_of_a_kind(monkeypatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    whole = figures._figure
    monkeypatch.setattr(figures, "_figure", lambda s: drawn.append(whole(s)) or drawn[-1])
    stale = [
        made.point(loss, dose, f"b{turn}", kind="staleness", source=f"staleness {age}", run_id=f"{age} {turn}",
                   has_collapsed=turn == 3)
        for age, dose in ((1, 0.2), (2, 2.0)) for turn, loss in enumerate((0.1 * age, 0.2 * age, 0.3 * age, 9.0))
    ]  # fmt: skip
    write(study([*made.cloud(24), *stale]), tmp_path / "tables", tmp_path / "figures")
    none, tis = drawn[0].axes[:2]
    (line,) = [line for line in none.lines if line.get_label() == "staleness"]
    assert line.get_xydata() == pytest.approx(np.array([[0.2, 0.2], [2.0, 0.4]]))
    assert not [line for line in tis.lines if line.get_label() == "staleness"]


def test_the_committed_page_is_of_the_committed_runs() -> None:
    results = ROOT / "results"
    committed = (results / "tables" / "dose_curve.md").read_text(encoding="utf-8")
    rows = curve_points(read_all_points(results))
    counts = Counter(p.correction for p in rows if p.task == TASK)
    own = [p for p in rows if p.task == TASK and counts[p.correction] >= MIN_RUNS]
    assert f"{len(own)} runs of `sort` on {len({p.base for p in own})} bases" in committed
    for b in bins(own):
        start = f"| {b.correction} | {b.name} | {b.dose:.2g} | {b.num_runs} | {b.num_bases} | "
        assert start + ("-" if b.loss != b.loss else f"{b.loss:+.3f}") in committed
