"""The scaling bench on this CPU: a timed run of random weights leaves steps, stages and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.devtools.bench import runner
from harness.tasks import build_task
from harness.tasks.count import Count
from harness.tasks.prompt_order import prompt_indices

pytestmark = pytest.mark.verl


def test_a_cell_is_measured_and_a_second_start_runs_nothing(tmp_path: Path) -> None:
    out, work = tmp_path / "x.json", tmp_path / "work"
    words = ["--device", "cpu", "--size", "toy", "--gpus", "1", "--precision", "bf16", "--prompts", "2", "--group", "2",
             "--prompt-tokens", "16", "--tokens", "12", "--steps", "3", "--out", str(out), "--work",
             str(work)]  # fmt: skip
    assert runner.run("verl_scaling", words) == 0
    text = out.read_text()
    cell = json.loads(text)["cells"]["toy 1 bf16"]
    assert cell["tokens"] == [48.0, 48.0]  # no response ends by itself
    assert [seconds > 0 for seconds in cell["steps"]] == [True, True]
    assert all(min(cell["stages"][stage]) > 0 for stage in ("generate", "old_logp", "update", "sync"))
    assert all(ratio == pytest.approx(1.0, abs=0.02) for ratio in cell["is_raw_mean"])
    assert list(work.iterdir()) == []
    assert runner.run("verl_scaling", words) == 0
    assert out.read_text() == text


def test_spread_lengths_on_drawn_weights_over_two_devices(tmp_path: Path) -> None:
    """LoRA on an engine of two devices, rows padded: every option that a large model needs."""
    out, work = tmp_path / "x.json", tmp_path / "work"
    words = ["--device", "cpu", "--size", "toy", "--gpus", "2", "--precision", "bf16", "--prompts", "2", "--group", "2",
             "--prompt-tokens", "16", "--tokens", "12", "--mean-tokens", "6", "--steps", "2", "--method", "bf16_lora",
             "--drawn", "--padded", "--unplanned", "--tensor-parallel", "2", "--out", str(out), "--work",
             str(work)]  # fmt: skip
    assert runner.run("verl_scaling", words) == 0
    cell = json.loads(out.read_text())["cells"]["toy 2 bf16"]
    task = build_task("count", {"max_new_tokens": 12, "mean_tokens": 6})
    assert isinstance(task, Count)
    lengths = [task.limit(index, number) for index in prompt_indices(0, range(4, 8), None) for number in range(2)]
    assert cell["tokens"] == [float(sum(lengths))] != [8.0 * 12]  # of the second step
    assert cell["metrics"]["sync/num_replicas"] == [1.0, 1.0]
    assert all(0 <= norm < 100 for norm in cell["metrics"]["train/grad_norm"])  # 0 where no answer has the token
    assert all(ratio == pytest.approx(1.0, abs=0.02) for ratio in cell["is_raw_mean"])
