"""Tables, figures and the comparison with claims on synthetic records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.studies.throughput.figures import compared_sizes, draw_crossing, draw_length, draw_map, ratio_grid
from harness.studies.throughput.plan import Sweep
from harness.studies.throughput.records import Record
from harness.studies.throughput.report import check_measured, markdown, write
from harness.studies.throughput.tables import compiling_words, crossing_words, csv_text, engine_table
from harness.studies.throughput.trust import check_lines, stepping_s
from tests.studies.throughput import made


def test_the_report_says_what_the_records_say(tmp_path: Path) -> None:
    """Rates, ratios, crossings, the two checks, skips and failures, by hand."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    text = markdown(sweep, records)
    # Context 1024 is the nearest to 2048: BF16 takes 5.024 ms, int8 4.224, int4 3.024 + 0.1 a sequence.
    assert "| 7b | bf16 | 199 | 1,592 | 12,739 |" in text
    assert "| 7b | int8 | 237 (1.19) | 1,894 (1.19) | 15,152 (1.19) |" in text
    assert "| 7b | int4 | 320 (1.61) | 2,092 (1.31) | 6,791 (0.53) |" in text
    assert "| 0.5b | int4 | - |" not in text  # it stands once, with the reason, under what is not measured
    # At 1024, 1 lies between 1.3138 at 8 and 0.5331 at 64: 8 x 8 ** (0.3138 / 0.7807) = 18.5.
    assert "| 7b | int4 | at 19 | at 18 | never up to 8 |" in text
    assert "a step takes 5.100 ms with a dummy context, 5.000 ms after a real prefill (+2.0 %)" in text
    assert "batch 64, 4096 new tokens generated for real: 20.0 s; the map does not reach it" in text
    assert "| 7b | bf16 | skipped: kv (the cache holds 200,000 tokens) | 64x4096 |" in text
    assert "| 0.5b | int4 | failed: RuntimeError: no kernel | all |" in text
    assert "| 7b | bf16 | 5.00 = 3.00 + 1.50 + 0.50 |" in text
    assert "SomeLinearKernel" in text


def test_the_csv_has_a_row_for_every_cell(tmp_path: Path) -> None:
    """2 sizes x 3 precisions x 9 cells, with status, ratio and the cost of a whole generation."""
    sweep = made.sweep(tmp_path)
    rows = made.cell_rows(csv_text(sweep, made.records(sweep)))
    assert len(rows) == 54
    found = {(row["size"], row["precision"], row["batch"], row["length"]): row for row in rows}
    row = found["7b", "int8", "8", "1024"]
    assert (row["status"], row["ratio_to_bf16"], row["vllm"]) == ("ok", "1.1894", "0.24.0")
    # 3.2 ms x 1024 + (1088^2 - 64^2) / 2000 ms
    assert float(row["generation_tokens_per_s"]) == pytest.approx(8 * 1024 / (3.2768 + 0.589824), abs=0.06)
    assert found["7b", "int8", "64", "4096"]["status"] == "skipped: kv"
    assert found["0.5b", "int4", "1", "512"]["status"] == "failed: RuntimeError: no kernel"


def test_the_report_of_nothing_is_refused(tmp_path: Path) -> None:
    """It says which command measures."""
    with pytest.raises(ValueError, match=r"nothing is measured; lowbit throughput throughput_made"):
        check_measured(made.sweep(tmp_path), {})


def test_figures_are_written_and_equal_for_equal_records(tmp_path: Path) -> None:
    """Four figures and two tables, byte for byte the same when written again."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    grid = ratio_grid(sweep, records, "7b", "int4")
    assert grid.shape == (3, 3)
    assert grid[1, 2] == pytest.approx(5.024 / 9.424)
    assert str(grid[2, 2]) == "nan"
    paths = write(sweep, records, markdown(sweep, records), tmp_path / "a")
    assert [path.name for path in paths] == [
        "throughput_made.md", "throughput_made.csv", "map.png", "crossing.png", "length.png", "decode.png"
    ]  # fmt: skip
    again = write(sweep, records, markdown(sweep, records), tmp_path / "b")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_a_crossing_in_words() -> None:
    """Never, at, from the first on, unknown."""
    assert crossing_words([(1, 1.5), (8, 1.2)]) == "never up to 8"
    assert crossing_words([(16, 1.2), (64, 0.8)]) == "at 32"
    assert crossing_words([(8, 0.9), (64, 0.8)]) == "from 8 on"
    assert crossing_words([]) == "-"


def disturbed_records(tmp_path: Path) -> tuple[Sweep, dict[str, Record]]:
    """The made records, with BF16's 8 x 1024 of the 7B disturbed."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    records["7b-bf16"]["cells"]["8x1024"]["step_ms_p90"] *= 1.5
    return sweep, records


def test_what_rests_on_a_disturbed_cell_is_marked(tmp_path: Path) -> None:
    """In its column the 7B's rows alone, and what a generation of 1024 tokens or more costs at no other batch."""
    sweep, records = disturbed_records(tmp_path)
    text = markdown(sweep, records)
    assert "| 7b | bf16 | 199 | ~1,592 | 12,739 |" in text
    assert "| 7b | int8 | 237 (1.19) | ~1,894 (1.19) | 15,152 (1.19) |" in text
    assert "| 0.5b | bf16 | 199 | 1,592 | 12,739 |" in text
    assert "| 7b | int4 | at 19 | ~at 18 | never up to 8 |" in text
    assert "marks what rests on a disturbed cell (1 of them)" in text
    assert "~" not in markdown(sweep, made.records(sweep))


def test_figures_hatch_and_hollow_what_was_disturbed(tmp_path: Path) -> None:
    """Two formats of the 7B at 8 x 1024; without a disturbed cell there is neither hatch nor legend."""
    sweep, records = disturbed_records(tmp_path)
    figure = draw_map(sweep, records)
    assert [len(ax.patches) for ax in figure.axes[:4]] == [0, 0, 1, 1]
    assert "hatched" in str(figure.get_supxlabel())
    assert not any(ax.patches for ax in draw_map(sweep, made.records(sweep)).axes[:4])

    def hollow(records: dict[str, Record]) -> list[int]:
        axes = draw_crossing(sweep, records).axes
        return [sum(line.get_markerfacecolor() == "white" for line in ax.lines) for ax in axes[:2]]

    assert hollow(records) == [0, 2]
    assert hollow(made.records(sweep)) == [0, 0]


def test_the_figure_of_lengths_hollows_what_waits_for_the_host(tmp_path: Path) -> None:
    """INT8 of the 0.5B idles most of a step at batch 64 and the shortest context, on which every generation rests."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    parts = {"step_ms": 1.0, "forward_ms": 0.05, "sampling_ms": 0.05, "host_ms": 0.9}
    records["0.5b-int8"]["breakdown"] = {"64": parts}
    hollow = [line for ax in draw_length(sweep, records).axes for line in ax.lines
              if line.get_markerfacecolor() == "white"]  # fmt: skip
    (line,) = hollow
    assert np.array_equal(line.get_xdata(), sweep.lengths)


def test_the_title_of_the_map_names_the_fastest_or_says_that_none_is_faster(tmp_path: Path) -> None:
    """INT4 of the 7B: 1.73, 1.61 and 1.31 by context at batch 1, 0.51 and 0.53 at batch 64."""
    sweep = made.sweep(tmp_path, made.YAML.replace("[bf16, int8, int4]", "[bf16, int4]"))
    assert draw_map(sweep, made.records(sweep)).get_suptitle() == (
        "At batch 1 int4 decodes fastest (1.6 x BF16),\n"
        "at batch 64 no format decodes faster than BF16 (at most 0.52 x, int4)"
    )


def test_sizes_with_nothing_but_bf16_have_no_panel(tmp_path: Path) -> None:
    """Unless there is nothing else at all."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    del records["0.5b-int8"]
    assert compared_sizes(sweep, records) == ["7b"]
    assert compared_sizes(sweep, {"0.5b-bf16": records["0.5b-bf16"]}) == ["0.5b"]


def test_a_generation_is_compared_with_the_map_by_context(tmp_path: Path) -> None:
    """4096 tokens at batch 8 after 64: 16.384 + 8.650 s on the map; 28 s here, 26 of them in steps, 10 % too long."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    steps = [{"context": n, "step_ms": (4 + n / 1e3) * over} for n, over in ((1000, 1.1), (3000, 1.0))]
    check = {"batch": 8, "length": 4096, "prompt": 64, "seconds": 28.0, "stepping_s": 26.0, "steps": steps}
    text = "\n".join(check_lines("7b-bf16", check, records))
    assert "28.0 s; the map says 25.0 s (-10.6 %)." in text
    assert "Of the difference of 3.0 s, 2.0 s lie outside the steps" in text
    assert "and 1.0 s within them" in text
    assert "Of 2 stretches 1 take what the map says within 1 %, the others +10 %." in text
    assert "| 1000 | 5.500 | - | 5.000 | +10.0 % | - |" in text
    assert "garbage collections" not in text
    mixed = [*steps, {"context": 2000, "step_ms": 6 * 0.8}]
    text = "\n".join(check_lines("7b-bf16", check | {"steps": mixed}, records))
    assert "Of 3 stretches 1 take what the map says within 1 %, the others -20 to +10 %." in text
    text = "\n".join(check_lines("7b-bf16", check | {"steps": steps[1:]}, records))
    assert "Of 1 stretches 1 take what the map says within 1 %. The map integrates medians" in text
    windows = [{"context": 512, "step_ms": 5.0, "median_ms": 4.524}]
    full = check | {"windows": windows, "collecting_s": 0.4, "num_collections": 7}
    text = "\n".join(check_lines("7b-bf16", full, records))
    assert "0.4 s went into 7 garbage collections" in text
    assert "| 512 | 5.000 | 4.524 | 4.512 | +10.8 % | +0.3 % |" in text
    del check["stepping_s"]
    assert stepping_s(check) == pytest.approx(4095 * (5.5 + 7.0) / 2e3)


def test_what_deep_gemm_compiles_is_told_per_engine_and_once_for_all(tmp_path: Path) -> None:
    """70 s for the first engine of a size, 8 for the next, whichever cache format that has."""
    sweep = made.sweep(tmp_path, made.YAML.replace("[bf16, int8, int4]", "[bf16, fp8_block, fp8_block+kv8]"))
    first = made.engine() | {"load_s": 70.4, "compiling": {"calls": 12, "seconds": 55.5}}
    second = made.engine() | {"load_s": 8.2, "started_at": "2026-11-21T00:05:00+00:00", "compiling": None}
    records: dict[str, Record] = {
        "7b-fp8_block": {"engines": [first], "cells": {}},
        "7b-fp8_block+kv8": {"engines": [second], "cells": {}},
    }
    assert "Loading takes 70 s and then 8 s at 7B." in compiling_words(sweep, records)
    assert "| 7b | fp8_block | 70.4 | 55.5 (12 kernels) |" in engine_table(sweep, records)
    assert "| 7b | fp8_block+kv8 | 8.2 | - |" in engine_table(sweep, records)
    assert compiling_words(sweep, {"7b-fp8_block": records["7b-fp8_block"]}) == ""
