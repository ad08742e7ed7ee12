"""JSON files whose list of rows stands a row a line, so that a comparison of two versions shows the rows that moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.foundation.json_object import read_json_object
from harness.foundation.whole_file import write_atomic


def write_json_rows(path: Path, record: Mapping[str, Any], rows: str, *, allow_nan: bool = False) -> None:
    """Write a record whose field `rows` is a list, which comes last. Raises ValueError for a number that is not finite
    (`allow_nan`: for one in a row alone; other fields may have them, as knobs do) and where it cannot be written."""
    others = {name: json.dumps(value, allow_nan=allow_nan) for name, value in record.items() if name != rows}
    rest = "".join(f"{json.dumps(name)}: {text}, " for name, text in others.items())
    lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in record[rows])
    write_atomic(path, f"{{{rest}{json.dumps(rows)}: [\n  {lines}\n]}}\n".encode())


def read_json_records(folder: Path) -> list[dict[str, Any]]:
    """Every record of a study's folder, by name. Raises ValueError where there is none, and for a damaged file."""
    found = [read_json_object(path, "delete it and measure again") for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"{folder}: no record yet; give a model folder to measure")
    return found
