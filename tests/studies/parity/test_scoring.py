"""Given responses scored along an engine's own path: what it recorded while sampling, and what a forward pass says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.api import Plan
from harness.numerics.formats import format_named
from harness.studies.parity.scoring import decoder_logp, engine_logp
from tests.engines.engine_cases import EVEN, FP32, UNEVEN, decoder, loaded, sample

W8A8 = Plan(rollout_weights=format_named("e4m3_channel"), rollout_acts=format_named("e4m3_token"))
PLANS = {"fp32": FP32, "fp8": W8A8, "nvfp4": Plan(rollout_weights=format_named("nvfp4")),
         "fp8+kv8": replace(W8A8, rollout_kv=format_named("e4m3_kv"))}  # fmt: skip


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", PLANS)
def test_scores_are_those_recorded_while_sampling(name: str, prompts: list[list[int]]) -> None:
    engine = loaded(decoder(), PLANS[name])
    engine.calibrate_kv(prompts)
    out = sample(engine, prompts, temperature=0.8)
    logp = engine_logp(engine, prompts, out.token_ids, 0.8)
    is_token = torch.arange(logp.shape[1]) < out.lengths[:, None]
    assert logp.shape == out.logp.shape
    # A W8A8 engine may round an input the other way where a matrix product was summed over fewer rows.
    assert float((logp - out.logp)[is_token].abs().median()) < 1e-6
    assert float((logp - out.logp)[is_token].abs().max()) < (1e-5 if name in ("fp32", "nvfp4") else 0.1)


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_in_float32_both_ways_agree(prompts: list[list[int]]) -> None:
    model = decoder()
    engine = loaded(model)
    out = sample(engine, prompts)
    is_token = torch.arange(out.token_ids.shape[1]) < out.lengths[:, None]
    exact = decoder_logp(model, prompts, out.token_ids, 1.0, rows=3)
    assert float((exact - engine_logp(engine, prompts, out.token_ids, 1.0))[is_token].abs().max()) < 1e-5
    assert float((exact - out.logp)[is_token].abs().max()) < 1e-5


def test_other_tokens_and_other_formats_have_other_scores() -> None:
    engine = loaded(decoder())
    out = sample(engine, EVEN)
    own = engine_logp(engine, EVEN, out.token_ids, 1.0)
    other = engine_logp(engine, EVEN, (out.token_ids + 1) % 24, 1.0)
    assert float(own[:, 0].mean()) > float(other[:, 0].mean()) + 0.5
    coarse = engine_logp(loaded(decoder(), PLANS["nvfp4"]), EVEN, out.token_ids, 1.0)
    assert float((own - coarse).abs().mean()) > 0.01
