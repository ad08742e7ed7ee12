"""The module that is trained: a 16-bit trainer's head is that of the engine, whatever the model's shape."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from harness.api import Plan
from harness.models.decoder import DecoderConfig
from harness.numerics.casting import CastEmbedding
from harness.numerics.formats import format_named
from harness.numerics.linear import CastLinear
from harness.trainers.local.policy import computing
from tests.engines.engine_cases import MOE, QWEN2, QWEN3, decoder, loaded, plan_of

FP32, HEAD = format_named("fp32"), "lm_head.weight"
SHAPES = {"tied": QWEN3, "untied": QWEN2, "mixture": MOE, "untied mixture": replace(MOE, tie_embeddings=False)}
PLANS = {
    "rounded": (plan_of("bf16"), False),
    "kept": (plan_of("bf16", lm_head=FP32), True),
    "kept by an exception": (plan_of("int4_g32", exceptions=((HEAD, FP32),)), True),
    "rounded by an exception": (plan_of("int4_g32", lm_head=FP32, exceptions=((HEAD, None),)), False),
}


@pytest.mark.parametrize(("plan", "is_kept"), PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_head_of_a_16_bit_trainer_is_the_engines(shape: DecoderConfig, plan: Plan, is_kept: bool) -> None:
    """To the bit, the same logits of the same hidden states, and the embedding is rounded beside it."""
    model = decoder(shape)
    trained = computing(copy.deepcopy(model), replace(plan, train_compute=format_named("bf16")))
    assert type(trained.lm_head) is (torch.nn.Linear if is_kept else CastLinear)
    assert type(trained.model.embed_tokens) is CastEmbedding
    assert (trained.lm_head.weight is trained.model.embed_tokens.weight) is shape.tie_embeddings
    h = torch.randn(7, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    logits = trained.head(h)
    assert torch.equal(logits, loaded(model, plan).weights.head(h))
    assert torch.equal(logits, model.head(h)) is is_kept
