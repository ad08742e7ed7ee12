"""The page of natural mismatch: ratios by hand, the same units beside each other, and the files."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.published.mismatch.ours import rows_of
from harness.published.mismatch.page import as_csv, headline, page, placed, sentences, stand_ins, theirs, write
from harness.published.mismatch.values import Published
from tests.published.mismatch.test_ours import ONE

TOKEN = Published(model="M", formats=("int8",), unit="token", low=2e-3, high=2e-2, source="s", place="p", read="notes")
SEQUENCE = replace(TOKEN, unit="sequence", low=0.5, high=0.5)
RATIO = replace(TOKEN, unit="ratio", low=100.0, high=100.0)
FOUND = [ONE, replace(ONE, format="bf16", k3=1e-5), replace(ONE, task="sort", n=64, parameters=3e6, k3=0.1),
         replace(ONE, task="sort", n=64, parameters=9e6, k3=0.3), replace(ONE, engine="embedded", k3=7.0)]  # fmt: skip


def test_published_values_stand_beside_ours_in_their_own_unit() -> None:
    rows = rows_of(FOUND)
    token, sequence, ratio = (line[-2:] for line in theirs([TOKEN, SEQUENCE, RATIO], rows))
    assert token == ("int8 1.0e-03 (200 tokens)", "int8 1.0e-01 (200 tokens)")
    assert sequence[0] == "int8 2.0e-01 (200 tokens)", "k3 x length"
    assert ratio == ("int8 100 (200 tokens)", "-"), "over BF16 of the same task; sorting has none here"


def test_stand_ins_are_of_real_kernels_alone() -> None:
    rows = rows_of(FOUND)
    assert {row.engine for task in ("wordmath", "sort") for row in stand_ins(rows, task)} == {"vllm"}
    assert {row.parameters for row in stand_ins(rows, "sort")} == {3e6}


def test_places_beside_a_value() -> None:
    assert placed(2e-3, TOKEN) == placed(2e-2, TOKEN) == "within"
    assert placed(1e-3, TOKEN) == "1/2 of" and placed(6e-2, TOKEN) == "3 times"
    assert sentences(rows_of(FOUND), [TOKEN, SEQUENCE]) == [
        "int8, 200 tokens: k3 1.0e-03, 1/2 of the 0.002 to 0.02 of M (s)."
    ]


def test_the_headline_needs_its_rows_and_has_their_numbers() -> None:
    values = [replace(TOKEN, formats=("bf16", "fp8_block"), low=0.0, high=1e-3, model="sound runs", source="N, docs"),
              replace(TOKEN, formats=("bf16",), low=6e-4, high=6e-4, model="Q")]  # fmt: skip
    assert headline(rows_of(FOUND), values).startswith("k3 of 5 combinations")
    fp8 = [replace(one, format="fp8_block") for one in FOUND if one.format == "int8" and one.engine == "vllm"]
    said = headline(rows_of([*FOUND, *fp8]), values)
    assert "1e-03 on word problems and 1e-01 on sorting" in said and "1/60 of Q's" in said


def test_the_files_hold_every_row(tmp_path: Path) -> None:
    written = write(FOUND, [TOKEN], tmp_path / "tables", tmp_path / "figures")
    assert [path.name for path in written] == ["mismatch.md", "mismatch.csv", "mismatch.png"]
    rows = list(csv.DictReader((tmp_path / "tables" / "mismatch.csv").read_text().splitlines()))
    assert len(rows) == 5 and float(rows[0]["k3"]) == 0.1 and rows[0]["sources"] == "sweep"
    assert "| int8 | 1.0e-04 | - | 4.0e-03 | - | - |" in page(FOUND, [TOKEN])


def test_an_unknown_number_is_an_empty_cell() -> None:
    (row,) = rows_of([replace(ONE, entropy=math.nan)])
    assert next(csv.DictReader(as_csv([row]).splitlines()))["entropy"] == ""
    with pytest.raises(KeyError):
        next(csv.DictReader(as_csv([row]).splitlines()))["seed"]
