"""Records of parity: `parity/<device>.json`, one per kind of device, rows by format, replaced one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.foundation.did_you_mean import nearest
from harness.foundation.json_object import read_json_object
from harness.foundation.whole_file import write_atomic
from harness.records.paths import parity_folder

Record = dict[str, Any]
FORMATS: dict[str, tuple[str, str | None, str | None]] = {
    "fp32": ("fp32", None, None),
    "bf16": ("bf16", "bf16", None),
    "fp16": ("fp16", "fp16", None),
    "bf16+kv8": ("bf16", "bf16", "e4m3_kv"),
    "fp8_tensor": ("e4m3_tensor", "e4m3_token", None),
    "fp8_channel": ("e4m3_channel", "e4m3_token", None),
    "fp8_channel+kv8": ("e4m3_channel", "e4m3_token", "e4m3_kv"),
    "fp8_block": ("e4m3_block", "e4m3_1x128", None),
    "int8": ("int8_channel", "int8_token", None),
    "w8a16": ("int8_g128", None, None),
    "int4": ("int4_g32", None, None),
    "nvfp4": ("nvfp4", None, None),
    "nvfp4_w4a4": ("nvfp4", "nvfp4_act", None),
    "mxfp4": ("mxfp4", None, None),
    "nf4": ("nf4", None, None),
}
"""Name as in conf/precision -> formats of weights, of what enters the linears, of the cache. In the table's order.
The formats are conf's, too, but for mxfp4 and nvfp4_w4a4, which follow compressed-tensors."""


def chosen(names: tuple[str, ...]) -> list[str]:
    """These formats, or all where none is named. Raises ValueError for one that there is not."""
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"formats: {name!r} is unknown; {nearest(name, FORMATS)}")
    return [name for name in FORMATS if not names or name in names]


def path_of(results: Path, device: str) -> Path:
    """Path of the record of a device."""
    return parity_folder(results) / f"{device}.json"


def read(results: Path) -> dict[str, Record]:
    """The records of every device, by device. Raises ValueError for a damaged file."""
    paths = sorted(parity_folder(results).glob("*.json"))
    return {path.stem: read_json_object(path, "delete it and measure again") for path in paths}


def begin(results: Path, device: str, setting: Record) -> Record:
    """The device's record where it was measured in this very setting, else a new one without rows."""
    old = read(results).get(device)
    if old is not None and {name: value for name, value in old.items() if name != "formats"} == setting:
        return old
    return {**setting, "formats": {}}


def keep(results: Path, device: str, record: Record) -> None:
    """Write a record, rows in the table's order."""
    rows = record["formats"]
    ordered = {**record, "formats": {name: rows[name] for name in FORMATS if name in rows}}
    text = json.dumps(ordered, indent=1, allow_nan=False) + "\n"
    write_atomic(path_of(results, device), text.encode())
