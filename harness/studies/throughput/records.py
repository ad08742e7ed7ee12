"""Result files of the map: one JSON per engine, rewritten whole and atomically after every cell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.foundation.json_object import read_json_object
from harness.foundation.whole_file import write_atomic
from harness.records.paths import throughput_folder
from harness.studies.throughput.plan import EngineSpec, Sweep, engine_specs

Record = dict[str, Any]


def read_record(path: Path) -> Record:
    """One file; empty where there is none. Raises ValueError naming a file that is not one of these."""
    if not path.is_file():
        return {}
    record = read_json_object(path)
    if record.get("schema_version") != 1:
        raise ValueError(f"{path}: not a throughput record")
    return record


def new_record(sweep: Sweep, spec: EngineSpec) -> Record:
    """Record with which a file starts."""
    head = {"schema_version": 1, "sweep": sweep.name, "size": spec.size, "precision": spec.precision, "engines": []}
    return head if spec.check is not None else head | {"cells": {}, "breakdown": {}}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Two levels of one line each, so that a diff of two files can be read."""
    lines: list[str] = []
    for key, value in record.items():
        if isinstance(value, Mapping) and key in ("cells", "breakdown") and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {_dumps(item)}" for name, item in value.items())
            lines.append(f' "{key}": {{\n{inner}\n }}')
        else:
            lines.append(f' "{key}": {_dumps(value)}')
    write_atomic(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def read_records(results: Path, sweep: Sweep) -> dict[str, Record]:
    """File stem -> record, in the order of the sweep; stems without a file are left out."""
    folder = throughput_folder(results, sweep.name)
    found = {spec.stem: read_record(folder / f"{spec.stem}.json") for spec in engine_specs(sweep)}
    return {stem: record for stem, record in found.items() if record}
