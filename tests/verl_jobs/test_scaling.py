"""The scaling bench on this CPU: a timed run of random weights leaves steps, stages and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.devtools.bench import verl_scaling

pytestmark = pytest.mark.verl


def test_a_cell_is_measured_and_a_second_start_runs_nothing(tmp_path: Path) -> None:
    out, work = tmp_path / "x.json", tmp_path / "work"
    words = ["--device", "cpu", "--size", "toy", "--gpus", "1", "--precision", "bf16", "--prompts", "2", "--group", "2",
             "--prompt-tokens", "16", "--tokens", "12", "--steps", "3", "--out", str(out), "--work",
             str(work)]  # fmt: skip
    assert verl_scaling.main(words) == 0
    text = out.read_text()
    cell = json.loads(text)["cells"]["toy 1 bf16"]
    assert cell["tokens"] == [48.0, 48.0]  # no response ends by itself
    assert [seconds > 0 for seconds in cell["steps"]] == [True, True]
    assert all(min(cell["stages"][stage]) > 0 for stage in ("generate", "old_logp", "update", "sync"))
    assert all(ratio == pytest.approx(1.0, abs=0.02) for ratio in cell["is_raw_mean"])
    assert list(work.iterdir()) == []
    assert verl_scaling.main(words) == 0
    assert out.read_text() == text
