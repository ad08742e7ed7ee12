"""A comparison for real: a worker process with vLLM, its answer, its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.models.checkpoint import save_decoder
from harness.models.decoder import DecoderConfig
from harness.studies.parity import driver
from harness.studies.parity.worker import FormatCase
from tests.engines.engine_cases import decoder

pytestmark = pytest.mark.needs_vllm
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = DecoderConfig(
    vocab_size=64, num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=128,
    max_positions=128,
)  # fmt: skip


def case(folder: Path, **words: Any) -> FormatCase:
    """The comparison of one format on a random policy."""
    save_decoder(decoder(SHAPE, std=0.1), folder)
    settings = {"weights": "e4m3_channel", "acts": "e4m3_token", "kv": None, "checkpoint": str(folder)} | words
    return FormatCase(
        device=DEVICE, prompts=[[3 + i, 4, 5 + 2 * i] for i in range(12)], num_samples=4, max_new_tokens=8,
        temperature=1.0, seed=1, eos_id=1, pad_id=0, out="", **settings,
    )  # fmt: skip


def test_the_emulation_explains_most_of_what_fp8_kernels_do(tmp_path: Path) -> None:
    answer = driver.run(case(tmp_path))
    assert answer["status"] == "ok", answer
    assert {len(values) for values in answer["scores"].values()} == {len(answer["scores"]["vllm"])}
    row = driver.row_of(answer)
    sizes = {pair: stats["mean_abs"] for pair, stats in row["pairs"].items()}
    assert 48 <= row["num_tokens"] <= 12 * 4 * 8 and row["kernels"] and row["acts"] == ["e4m3_token"]
    assert 0.005 < sizes["vllm-fp32"] < 0.3, sizes
    assert sizes["vllm-embedded"] < 0.8 * sizes["vllm-fp32"] and row["correlation"] > 0.5, (sizes, row["correlation"])


def test_a_format_that_vllm_refuses_is_an_answer_and_a_crash_says_why(tmp_path: Path) -> None:
    refused = driver.run(case(tmp_path, weights="nf4", acts=None))
    assert refused["status"] == "refused" and "bitsandbytes" in refused["reason"]
    failed = driver.run(case(tmp_path, checkpoint=str(tmp_path / "nowhere")))
    assert failed["status"] == "failed" and failed["reason"].startswith("ValueError: cannot read"), failed
