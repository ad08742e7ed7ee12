"""The benchmark of long sequences on a CPU: the options agree, what does not fit is a row, bad words are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.devtools.bench import long_sequences, runner
from harness.devtools.bench.long_sequences import batch, usual

TOY = ["--device", "cpu", "--size", "toy", "--lengths", "32", "48", "--tokens", "96", "--repeats", "1"]


def test_every_option_takes_the_same_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "harness.trainers.local.forward.FLOATS_PER_MIB", 20
    )  # 20 rows of logits, where 1024 MiB may stand
    out = tmp_path / "x.json"
    assert runner.run("long_sequences", [*TOY, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["option"] for row in found["rows"]] == [name for name in usual("cpu") for _ in range(2)]
    assert [row["num_rows"] for row in found["rows"][:2]] == [3, 2]
    for length in (32, 48):
        rows = [row for row in found["rows"] if row["length"] == length]
        is_rounded = {row["option"]: "bf16" in row["option"] or "jet_rl" in row["option"] for row in rows}
        exact = {(round(row["loss"], 4), round(row["norm"], 3)) for row in rows if not is_rounded[row["option"]]}
        assert len(exact) == 1 and all(row["tokens_per_s"] > 0 for row in rows)
        far = {row["option"]: abs(row["loss"] - rows[0]["loss"]) for row in rows}
        assert all(gap < (2e-2 if "jet_rl" in option else 2e-3) for option, gap in far.items())  # FP8 products
    assert found["rows"][0]["loss"] != found["rows"][1]["loss"]


def test_rows_are_ragged_and_the_first_is_full() -> None:
    seqs = batch(64, 256, 100, "cpu")
    assert seqs.prompt_lens == 8 and seqs.ids.shape == (4, 64)
    assert (8 + seqs.sampled.sum(1)).tolist() == [64, 48, 32, 16]
    assert len(batch(512, 256, 100, "cpu").ids) == 1


def test_what_does_not_fit_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*words: object) -> tuple[float, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(long_sequences, "update", full)
    out = tmp_path / "x.json"
    assert runner.run("long_sequences", [*TOY, "--options", "plain", "--out", str(out)]) == 0
    assert [row["failed"] for row in json.loads(out.read_text())["rows"]] == ["out of memory"] * 2
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "0.6b"], "sizes: '0.6b' is unknown"),
        (["--options", "chunk"], "--options: 'chunk' is unknown; nearest: chunks"),
        (["--lengths", "4"], "--lengths: 4 tokens; valid: 8 to 32768"),
        (["--repeats", "0"], "--repeats: 0; valid: >= 1"),
        (["--tokens", "0"], "--tokens: 0; valid: >= 1"),
        (["--size", "toy", "--layers", "0"], "--layers: 0; valid: 1 to 2 for --size toy"),
        (["--size", "toy", "--layers", "3"], "--layers: 3; valid: 1 to 2 for --size toy"),
    ],
)
def test_bad_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run("long_sequences", ["--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
