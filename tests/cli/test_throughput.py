"""`lowbit throughput`: the dry run of a sweep, and its report, which is printed whether or not it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.foundation.project_files import HOME


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["throughput_cpu"], "throughput_cpu: 4 of 4 engines to start, about 66 s on the CPU with 8 GiB"),
        (
            ["throughput_h200", "--only", "size=7b,precision=int8"],
            "1 of 1 engines to start, about 40 s on 1 GPU of 140 GiB",
        ),
        (
            ["throughput_h200", "--only", "size=7b,precision=int8", "--gpus", "2"],
            "1 of 1 engines to start, about 20 s on 2 GPUs of 140 GiB",
        ),
    ],
)
def test_a_dry_run_says_how_long_it_takes_and_where(
    words: list[str], last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["throughput", *words, "--dry-run", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_printed_and_written_where_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(HOME / "results" / "throughput" / "throughput_h200", tmp_path / "throughput" / "throughput_h200")
    words = ["throughput", "throughput_h200", "--report", "--results", str(tmp_path)]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert not (tmp_path / "tables").exists()
    assert main([*words, "--write"]) == 0
    path = tmp_path / "tables" / "throughput_h200.md"
    out = capsys.readouterr().out
    assert out.startswith(f"{page}written: {path}, ") and page == path.read_text(encoding="utf-8") + "\n"
