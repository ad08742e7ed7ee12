"""The benchmark of the head on a CPU: three ways agree, bad words are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.devtools.bench import runner

TOY = ["--device", "cpu", "--hidden", "16", "24", "--vocabulary", "2048", "--tokens", "300", "--logits-mib", "1",
       "--repeats", "1"]  # fmt: skip


def test_the_three_ways_agree(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    assert runner.run("head", [*TOY, "--dtype", "float32", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["hidden"], row["way"]) for row in rows] == [
        (hidden, way) for hidden in (16, 24) for way in ("whole", "chunks", "chunks, compiled")
    ]
    assert all(row["largest_distance"] < 1e-5 and row["forward_s"] > 0 < row["backward_s"] for row in rows)


def test_rounding_to_bfloat16_shows(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    assert runner.run("head", [*TOY, "--hidden", "16", "--out", str(out)]) == 0
    assert all(1e-4 < row["largest_distance"] < 0.1 for row in json.loads(out.read_text())["rows"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu", "--tokens", "0"], "--tokens: 0; valid: >= 1"),
        (["--device", "cpu", "--logits-mib", "-1"], "--logits-mib: -1; valid: >= 1"),
        (["--device", "cpu", "--hidden", "0"], "--hidden: 0; valid: >= 1"),
    ],
)
def test_bad_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run("head", words) == 2
    assert capsys.readouterr().err == f"head: {said}\n"
