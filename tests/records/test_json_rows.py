"""JSON files with a row on each line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.records.json_rows import write_json_rows


def test_rows_come_last_with_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.json"
    record = {"id": "x", "rows": [{"k": 1.5}, {"k": None}], "knobs": {"cap": math.inf, "tags": ["a", "b"]}}
    write_json_rows(path, record, "rows", allow_nan=True)
    assert path.read_text().splitlines() == [
        '{"id": "x", "knobs": {"cap": Infinity, "tags": ["a", "b"]}, "rows": [',
        '  {"k": 1.5},',
        '  {"k": null}',
        "]}",
    ]
    assert json.loads(path.read_bytes()) == record


@pytest.mark.parametrize("record", [{"rows": []}, {"rows": [{"k": 1}]}, {"a": 1, "rows": []}])
def test_few_rows_or_no_other_field_are_json(record: dict[str, object], tmp_path: Path) -> None:
    write_json_rows(tmp_path / "x.json", record, "rows")
    assert json.loads((tmp_path / "x.json").read_bytes()) == record


def test_numbers_are_finite_but_where_other_fields_may_have_others(tmp_path: Path) -> None:
    for record, allow_nan in (({"rows": [{"k": math.nan}]}, True), ({"cap": math.inf, "rows": []}, False)):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json_rows(tmp_path / "x.json", record, "rows", allow_nan=allow_nan)
    assert not (tmp_path / "x.json").exists()
