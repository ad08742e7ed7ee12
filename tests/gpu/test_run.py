"""Whole runs on a CUDA device: the same loop, exact zero mismatch, formats that take effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.run.cell import run_cell
from harness.run.loop import grpo_step
from tests.toy import small_config, small_launch, small_run

pytestmark = pytest.mark.gpu
CUDA = "trainer.device=cuda"


def test_zero_mismatch_is_exactly_zero(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=zero_mismatch", "engine.max_batch=16", CUDA])
    for _ in range(2):
        assert grpo_step(run)["mismatch/logp_absdiff_max"] == 0.0


def test_cached_sampler_in_fp32_is_within_1e_5(tmp_path: Path) -> None:
    row = grpo_step(small_run(tmp_path, ["method=bf16", "precision=fp32", CUDA]))
    assert row["mismatch/logp_absdiff_max"] < 1e-5


@pytest.mark.parametrize(
    "words", [("method=flashrl", "precision=int8"), ("method=naive", "precision=nvfp4+kv8"), ("method=fp16",)]
)
def test_runs_to_the_end_and_agrees_with_the_cpu_at_step_0(tmp_path: Path, words: tuple[str, ...]) -> None:
    on_gpu = run_cell(small_config(*words, CUDA), small_launch(tmp_path))
    on_cpu = run_cell(small_config(*words), small_launch(tmp_path))
    assert (on_gpu.status, on_cpu.status) == ("ok", "ok"), on_gpu.error
    assert on_gpu.hardware["gpu"] == torch.cuda.get_device_name()
    assert on_gpu.passport is not None and on_cpu.passport is not None
    assert [t["format"] for t in on_gpu.passport["weights"]] == [t["format"] for t in on_cpu.passport["weights"]]
    assert on_gpu.passport["acts"] == on_cpu.passport["acts"]


def test_codes_are_those_of_the_cpu(tmp_path: Path) -> None:
    hashes: list[list[str]] = []
    for device in ("cuda", "cpu"):
        run = small_run(tmp_path, ["method=naive", "precision=int4", f"trainer.device={device}"])
        grpo_step(run)
        assert run.passport is not None
        hashes.append([t.hash for t in run.passport.weights])
    assert hashes[0] == hashes[1]
