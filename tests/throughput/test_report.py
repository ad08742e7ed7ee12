"""Tables, figures and the comparison with claims on synthetic records."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.throughput.claimed import CLAIMED, Claimed, compare
from harness.throughput.figures import ratio_grid
from harness.throughput.report import markdown, write
from harness.throughput.shapes import PRECISIONS, SIZES
from harness.throughput.tables import crossing_words, csv_text
from tests.throughput import made


def test_the_report_says_what_the_records_say(tmp_path: Path) -> None:
    """Rates, ratios, crossings, the two checks, skips and failures, by hand."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    text = markdown(sweep, records)
    # Context 1024 is the nearest to 2048: BF16 takes 5.024 ms, int8 4.224, int4 3.024 + 0.1 a sequence.
    assert "| 7b | bf16 | 199 | 1,592 | 12,739 |" in text
    assert "| 7b | int8 | 237 (1.19) | 1,894 (1.19) | 15,152 (1.19) |" in text
    assert "| 7b | int4 | 320 (1.61) | 2,092 (1.31) | 6,791 (0.53) |" in text
    assert "| 0.5b | int4 | - | - | - |" in text
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
    with pytest.raises(ValueError, match=r"nothing is measured in .*lowbit throughput throughput_made"):
        write(made.sweep(tmp_path), {}, tmp_path)


def test_figures_are_written_and_equal_for_equal_records(tmp_path: Path) -> None:
    """Three figures and two tables, byte for byte the same when written again."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)
    grid = ratio_grid(sweep, records, "7b", "int4")
    assert grid.shape == (3, 3)
    assert grid[1, 2] == pytest.approx(5.024 / 9.424)
    assert str(grid[2, 2]) == "nan"
    paths = write(sweep, records, tmp_path / "a")
    assert [path.name for path in paths] == [
        "throughput_made.md", "throughput_made.csv", "map.png", "crossing.png", "length.png"
    ]  # fmt: skip
    again = write(sweep, records, tmp_path / "b")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_a_crossing_in_words() -> None:
    """Never, at, from the first on, unknown."""
    assert crossing_words([(1, 1.5), (8, 1.2)]) == "never up to 8"
    assert crossing_words([(16, 1.2), (64, 0.8)]) == "at 32"
    assert crossing_words([(8, 0.9), (64, 0.8)]) == "from 8 on"
    assert crossing_words([]) == "-"


def test_claims_are_about_cells_that_exist() -> None:
    """Sizes and precisions of the map, rising ranges."""
    for claim in CLAIMED:
        assert claim.size in SIZES
        assert claim.precision in PRECISIONS
        assert 0 <= claim.low <= claim.high


def test_verdicts_follow_from_the_factors(tmp_path: Path) -> None:
    """int8 decodes 512 tokens of context at 4.512 / 3.712 = 1.216 of BF16."""
    sweep = made.sweep(tmp_path)
    records = made.records(sweep)

    def verdict(low: float, high: float, precision: str = "int8", batch: int | None = 1) -> str:
        claim = Claimed(
            source="s", where="w", size="7b", precision=precision, low=low, high=high, batch=batch, length=512
        )
        return compare(sweep, records, [claim])[0].verdict

    assert verdict(1.1, 1.3) == "seen"
    assert verdict(1.24, 1.3) == "seen"
    assert verdict(1.25, 1.3) == "less here"
    assert verdict(1.0, 1.18) == "more here"
    assert verdict(1.0, 1.18, "nvfp4") == "no such cell"
    assert verdict(1.2, 1.3, "int8", None) == "seen at some batches"
    # A whole generation of 512 tokens in int4: 1.73 at 1, 1.33 at 8, 0.50 at 64.
    assert verdict(0.9, 1.0, "int4", None) == "around it"
