"""Records of several devices: merged into one table and one figure, rows replaced one by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.cli.parity import report
from harness.studies.parity import record, table
from harness.studies.parity.driver import row_of
from tests.studies.parity.test_statistics import scores

REFUSED = {"status": "refused", "reason": "no kernel | for\nit"}


def setting(device: str) -> dict[str, Any]:
    """Fields of a record other than its rows."""
    gpu = {"gpu": "NVIDIA H200"} if device == "cuda" else {}
    return {
        "engine": f"vllm-{device}-1.2.3", "packages": {"torch": "2.0"}, "hardware": {"cpu": "a processor", **gpu},
        "model": "xs128", "task": "sort8", "checkpoint_hash": "abc", "num_responses": 512, "temperature": 1.0,
    }  # fmt: skip


def measured(kernel: str = "Marlin", **how: float) -> dict[str, Any]:
    """A row, by the way of a worker's answer."""
    lines = [{"kernel": name} for name in (kernel, "", kernel)]
    passport = {"weights": lines, "acts": {"a": "bf16"}, "kv": None, "state": {"attention": ["Flash"]}}
    found = {name: list(values) for name, values in scores(**how).items()}
    return row_of({"status": "ok", "num_responses": 512, "scores": found, "passport": passport})


def test_a_row_keeps_statistics_and_kernels_but_no_tokens() -> None:
    row = measured()
    assert row["kernels"] == ["Marlin"] and row["attention"] == ["Flash"] and row["acts"] == ["bf16"]
    assert "scores" not in row and row["ratio"] == pytest.approx(0.2, rel=0.03)
    assert row_of(REFUSED) == REFUSED


def test_the_table_merges_devices_by_format() -> None:
    records = {
        "cuda": {**setting("cuda"), "formats": {"nvfp4": measured(), "bf16": measured("Plain", shared=0.0)}},
        "cpu": {**setting("cpu"), "formats": {"bf16": measured("Plain"), "nvfp4": REFUSED}},
    }
    cells = list(table.rows(records))
    assert [row[:2] for row in cells] == [["bf16", "cpu"], ["bf16", "cuda"], ["nvfp4", "cpu"], ["nvfp4", "cuda"]]
    assert {len(row) for row in cells} == {len(table.HEAD)}
    assert cells[2][2] == "refused: no kernel | for it" and set(cells[2][3:]) == {"-"}
    assert cells[3][2] == "Marlin" and float(cells[3][3]) == pytest.approx(0.01 * math.sqrt(2 / math.pi), rel=0.03)
    assert cells[1][-2:] == ["-", "-"], "an exact emulation has no correlation and no ratio"
    text = table.markdown(records)
    assert "* cuda: vllm-cuda-1.2.3 (torch 2.0) on NVIDIA H200; xs128 on sort8, 512 responses" in text
    assert "refused: no kernel \\| for it" in text, "a bar within a cell is escaped"
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + 4


def test_rows_are_replaced_in_the_same_setting_and_dropped_in_another(tmp_path: Path) -> None:
    first = record.begin(tmp_path, "cpu", setting("cpu"))
    first["formats"]["nvfp4"], first["formats"]["bf16"] = REFUSED, measured()
    record.keep(tmp_path, "cpu", first)
    again = record.begin(tmp_path, "cpu", setting("cpu"))
    assert list(again["formats"]) == ["bf16", "nvfp4"], "in the table's order"
    assert again["formats"]["bf16"] == measured()
    assert record.begin(tmp_path, "cpu", {**setting("cpu"), "checkpoint_hash": "other"})["formats"] == {}
    assert record.begin(tmp_path, "cuda", setting("cuda"))["formats"] == {}


def test_damaged_and_missing_records_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parity was measured yet"):
        report(tmp_path, is_written=True)
    path = record.path_of(tmp_path, "cpu")
    path.parent.mkdir()
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not valid JSON: .*; delete it and measure again"):
        report(tmp_path, is_written=True)


def test_unknown_formats_name_the_nearest() -> None:
    assert record.chosen(("nvfp4", "bf16")) == ["bf16", "nvfp4"] and record.chosen(()) == list(record.FORMATS)
    with pytest.raises(ValueError, match=r"'fp8_chanel' is unknown.*fp8_channel"):
        record.chosen(("fp8_chanel",))


def test_the_report_writes_the_table_and_draws_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in ("cpu", "cuda"):
        record.keep(tmp_path, device, {**setting(device), "formats": {"bf16": measured(), "nvfp4": REFUSED}})
    assert report(tmp_path, is_written=True) == 0
    path = tmp_path / "tables" / "parity.md"
    drawn = tmp_path / "figures" / "parity" / "parity.png"
    assert capsys.readouterr().out == f"{path.read_text(encoding='utf-8')}\nwritten: {path}, {drawn}\n"
    image = np.asarray(Image.open(tmp_path / "figures" / "parity" / "parity.png").convert("RGB")).astype(int)
    blue = (np.abs(image - [0x00, 0x72, 0xB2]).sum(2) < 30).nonzero()[1]
    half = image.shape[1] // 2
    assert min((blue < half).sum(), (blue >= half).sum()) > 100, "vLLM - embedded is missing in one of the two panels"
    assert "NVIDIA H200" in path.read_text(encoding="utf-8")
