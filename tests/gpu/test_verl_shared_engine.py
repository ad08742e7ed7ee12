"""A vLLM engine over two GPUs of a timed job at 1.5B: pushes by kernels to shares, and the passport of one GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Passport
from harness.devtools.bench import runner, verl_scaling
from harness.engines.vllm.memory import num_parameters
from harness.engines.vllm.weights import SMALL
from harness.run.checks import check
from harness.start.prepare import start_of
from harness.studies.throughput.shapes import shape_of
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.parent import Watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]


def passport_of(folder: Path, model: Path, gpus: int, precision: str) -> Passport:
    """The last passport of a job of two steps that move no weight: 1e-60 is 0 in float32."""
    words = ["--out", str(folder / "x.json"), "--work", str(folder), "--prompts", "2", "--group", "4", "--tokens", "32",
             "--steps", "2", "--tensor-parallel", str(gpus)]  # fmt: skip
    given = runner.parsed("verl_scaling", words)
    config, launch = verl_scaling.cell_of(model, "1.5b", gpus, precision, given)
    config = replace(config, trainer=replace(config.trainer, lr=1e-60))
    composed = check(config)
    work = folder / f"{gpus}-{precision}"
    run = Watched(lay_out(config, launch, composed, start_of(config, launch), work, is_timed=True), composed)
    try:
        run.train(lambda step, reward: None, lambda: False, RuntimeError)
        assert all(
            ratio == pytest.approx(1.0, abs=0.05) for ratio in [row["mismatch/is_raw_mean"] for row in run.series]
        )
        assert run.passport is not None
        return run.passport
    finally:
        run.close()


@pytest.mark.parametrize("precision", ["bf16", "fp8_block", "fp8_channel"])
def test_two_gpus_have_the_passport_of_one(tmp_path: Path, precision: str) -> None:
    assert num_parameters(shape_of("1.5b")) > SMALL  # kernels write, where tiles lie in one share
    verl_scaling.make_folder(tmp_path / "m", "1.5b", "cuda")
    alone, shared = (passport_of(tmp_path, tmp_path / "m", gpus, precision) for gpus in (1, 2))
    assert shared.weights == alone.weights
    assert shared.acts == alone.acts
    assert len({record.hash for record in shared.weights if "_proj.weight" in record.name}) > 100
