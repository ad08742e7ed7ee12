"""The float32 head: both sites follow it, and it composes with 16-bit training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.numerics.casting import CastEmbedding
from harness.numerics.linear import CastLinear
from harness.run.loop import grpo_step, train
from tests.toy import small_run


def test_the_engine_rounds_its_head_no_more(tmp_path: Path) -> None:
    gaps = {}
    for method in ("bf16", "fp32_head"):
        run = small_run(tmp_path, [f"method={method}"])
        row = grpo_step(run)
        assert run.passport is not None
        heads = [record.format for record in run.passport.weights if record.name == "lm_head.weight"]
        assert heads == ([] if method == "bf16" else ["fp32"])  # a tied head is the embedding, in its format
        gaps[method] = row["mismatch/logp_absdiff_mean"]
    assert 0 < gaps["fp32_head"] < 0.9 * gaps["bf16"]


def test_sixteen_bit_training_leaves_the_head_alone(tmp_path: Path) -> None:
    run = small_run(tmp_path, ["method=fp16", "precision=fp16", "parts=[fp16.HalfPrecision,fp32_head.FP32Head]"])
    model = run.trainer.model
    assert type(model.lm_head) is torch.nn.Linear and isinstance(model.model.embed_tokens, CastEmbedding)
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj"), CastLinear)
    train(run, lambda _: None)
    assert run.step == 4 and all(row["train/skipped"] == 0.0 for row in run.series)


def test_a_part_it_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown part fp32_head\.Head; nearest: fp32_head\.FP32Head"):
        small_run(tmp_path, ["parts=[fp32_head.Head]"])
