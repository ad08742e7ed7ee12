"""Sentences, tables and the figure of probes made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from harness.studies.probe import figure as figures
from harness.studies.probe.report import Table, is_above_floor, name_of, page, sentences, tables, write
from tests.studies.probe import made

LOW = made.row("w8a16", 2.4e-4, 5e-5)  # from 1.9e-4, the floor's reaches 2.5e-4
HIGH = made.row("int8", 2e-3, 5e-4)
FAR = made.row("int4", 0.03)


def test_formats_are_told_apart_from_the_floor_by_their_intervals() -> None:
    record = made.record(LOW, HIGH, FAR)
    assert [is_above_floor(row, record) for row in record["formats"]] == [False, False, False, True, True]
    assert sentences(record) == [
        "base: the floor, bf16 sampled twice, has a k3 of 0.0001 and 0.0002.",
        "base: not told apart from the floor: w8a16.",
        "base: k3 over the floor's: int8 10 times, int4 150 times.",
    ]


def test_a_format_below_the_floor_says_so() -> None:
    """The floor's intervals begin at 5e-5 at the least."""
    finer = made.row("fp16", 1e-5, 1e-6)
    assert sentences(made.record(finer, LOW, HIGH))[1:3] == [
        "base: below the floor: fp16.", "base: not told apart from the floor: w8a16.",
    ]  # fmt: skip
    record = made.record(made.row("fp16", 4.8e-5, 3e-6), LOW)
    assert sentences(record)[1] == "base: not told apart from the floor: fp16, w8a16."


def test_untrained_weights_say_so_first() -> None:
    assert sentences(made.record(HIGH, is_untrained=True))[0].startswith("base: untrained, so costs alone count")


def test_a_probe_that_shared_its_gpu_says_so() -> None:
    alone, shared = made.record(HIGH), made.record(HIGH)
    alone["formats"][0]["others_gib"], shared["formats"][1]["others_gib"] = 0.6, 23.4
    assert not any("other processes" in line for line in sentences(alone))
    assert sentences(shared)[0] == (
        "base: other processes held 23 GiB of the GPU, so its rates are not those of a GPU alone."
    )


def test_a_floor_of_nothing_is_no_denominator() -> None:
    record = made.record(HIGH)
    record["formats"][:2] = [made.row("bf16", 0.0, 0.0), made.row("bf16", 0.0, 0.0, name="bf16 again")]
    assert sentences(record)[-1] == "base: k3, where the floor has none: int8 0.002."


def test_the_tables_have_the_numbers() -> None:
    record = made.record(HIGH, made.row("int2", 1.0, accuracy=None, cache_tokens=12345, memory_gib={"allocated": 1.5}))
    mismatch, costs, effects = tables([record])
    assert mismatch.rows[2] == (
        "base", "int8", "0.002", "[0.0015, 0.0025]", "0.001", "0.1", "0.2", "0.3", "0.005", "0.8 at 2",
        "0.250 [0.100, 0.500]",
    )  # fmt: skip
    # Two of eight answers are a quarter, one is not; a value without an interval has none.
    assert mismatch.rows[3][3] == "-" and mismatch.rows[3][-1] == "-"
    assert costs.rows[2] == (
        "base", "int8", "3 bf16, inputs bf16", "1,234", "0.01 s", "16.000", "0.5 GiB", "0.25 KiB", "-", "-",
    )  # fmt: skip
    assert costs.rows[3][-2:] == ("12,345", "1.50 GiB")
    assert effects.header == ("correction", "bf16", "bf16 again", "int8", "int2")
    assert effects.rows == [("flashrl, bf16_tis", *["1% 100% 0.95"] * 4), ("mis", *["50% 50% 0.8"] * 4)]
    assert mismatch.text().splitlines()[0] == mismatch.title and mismatch.markdown().startswith(f"## {mismatch.title}")


def test_a_long_list_of_corrections_goes_on_in_further_rows_of_the_text_alone() -> None:
    names = ", ".join(f"correction_{i}" for i in range(8))
    table = Table(title="t", header=("correction", "int8"), rows=[(names, "1%")])
    lines = table.text().splitlines()[3:]
    assert lines[0] == f"{'correction_0, correction_1, correction_2,':<42} 1%"
    assert lines[1:] == ["correction_3, correction_4, correction_5,", "correction_6, correction_7"]
    assert f"| {names} | 1% |" in table.markdown()


def test_several_probes_are_one_page(tmp_path: Path) -> None:
    records = [made.record(HIGH), made.record(FAR, folder="step 20", id="ba9876543210")]
    text = page(records)
    assert text.startswith("# Probe\n\n- base: the floor") and "- step 20: k3 over the floor's: int4 150 times." in text
    assert "- base: 8 answers of 2 prompts each, task sort, engine embedded, probe 0123456789ab" in text
    assert len(tables(records)[0].rows) == 6 and len(tables(records)) == 2 + 2
    assert name_of(records[:1]) == "probe_0123456789ab"
    assert name_of(records) == name_of(list(records)) != name_of(records[::-1])
    paths = write(records, tmp_path / "tables", tmp_path / "figures")
    assert [path.name for path in paths] == [f"{name_of(records)}.md", f"{name_of(records)}.png"]
    assert paths[0].read_text(encoding="utf-8") == text
    assert np.asarray(imread(paths[1])).std() > 0.05


def test_the_figure_has_a_mark_for_every_format_over_the_floor() -> None:
    figure = figures.figure_of([made.record(LOW, HIGH), made.record(FAR, folder="step 20")])
    above, *below = figure.get_axes()
    assert above.get_title() == "step 20: k3 0.03 (int4), the floor 0.0002"
    first = figures.figure_of([made.record(LOW, HIGH)]).get_axes()[0]
    assert first.get_title() == "base: k3 from 0.00024 (w8a16) to 0.002 (int8), the floor 0.0002"
    assert [tick.get_text() for tick in above.get_xticklabels()] == ["bf16", "bf16 again", "w8a16", "int8", "int4"]
    marks = [line for line in above.lines if line.get_marker() in figures.MARKERS and np.size(line.get_xdata())]
    drawn = sorted(float(np.asarray(line.get_ydata()).item()) for line in marks)
    assert drawn == sorted([1e-4, 2e-4, 2.4e-4, 2e-3, 1e-4, 2e-4, 0.03])
    assert [ax.get_xlabel() for ax in below] == [words for *_, words in figures.PROFILES]
    assert all(len(ax.lines) == 3 for ax in below), "profiles of the last probe"
    alone = figures.figure_of([made.record(is_untrained=True)]).get_axes()[0]
    assert alone.get_title() == "base: bf16 alone" and alone.texts[0].get_text() == "untrained: costs only"
