"""Attention over a rounded cache: against the engine's own cache and hand arithmetic, and counts of known values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from harness.engines.embedded.engine import EmbeddedEngine
from harness.numerics.kv_scales import quantize_kv
from harness.studies.fp8_cache.answers import log_probs
from harness.studies.fp8_cache.attention import FORMAT, Cache, CachedAttention, Counts, rounded, through
from harness.studies.parity.scoring import engine_logp
from tests.engines.engine_cases import EOS, FP32, PAD, weights
from tests.studies.fp8_cache.made import answers, sharp


def test_one_scale_rounds_as_the_cache_does_and_heads_each_under_their_own() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)) * 7
    scale = torch.tensor([0.013])
    assert torch.equal(rounded(x, scale), quantize_kv(x, FORMAT, scale[0]))
    scales = torch.tensor([0.5, 0.013, 0.0001])
    for head, own in enumerate(scales):
        assert torch.equal(rounded(x, scales)[:, head], quantize_kv(x[:, head], FORMAT, own))


def test_without_scales_nothing_changes_and_the_own_attention_comes_back() -> None:
    model, given = sharp(), answers()
    layers: list[Any] = list(model.model.layers)
    cores = [layer.self_attn.core for layer in layers]
    exact = log_probs(model, given)
    with through(model, Cache(scales={})) as counts:
        assert torch.equal(log_probs(model, given), exact) and counts.shares() == {}
    assert [layer.self_attn.core for layer in layers] == cores


@pytest.mark.parametrize("scale", [0.02, 1.0, 60.0], ids=["saturating", "one", "subnormal"])
def test_one_pass_scores_as_the_engine_token_by_token(scale: float) -> None:
    model, given = sharp(), answers()
    engine = EmbeddedEngine(model.config, replace(FP32, rollout_kv=FORMAT), eos_id=EOS, pad_id=PAD)
    engine.load_weights(weights(model))
    scales = scale * torch.rand(3, 2, generator=torch.Generator().manual_seed(2)) + scale / 2
    engine.kv.scales = scales
    prompts = [row[:n].tolist() for row, n in zip(given.ids, given.prompt_lens.tolist(), strict=True)]
    tokens = torch.zeros(3, 6, dtype=torch.int64)
    for row, (n, m) in enumerate(zip(given.prompt_lens.tolist(), given.lens.tolist(), strict=True)):
        tokens[row, :m] = given.ids[row, n : n + m]
    expected = engine_logp(engine, prompts, tokens, 1.0)[torch.arange(6) < given.lens[:, None]]
    with through(model, Cache(scales={"k": scales[:, :1], "v": scales[:, 1:]})):
        found = log_probs(model, given).gather(1, given.tokens()[:, None])[:, 0]
    exact = log_probs(model, given).gather(1, given.tokens()[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-4
    assert (found - exact).abs().max() > 1e-2, "the cache changes nothing here"


def test_counts_of_known_values() -> None:
    counts = Counts(real=torch.tensor([[True, True, False]]))
    #            saturated  edge    normal  subnormal  becomes 0   zero   not counted
    x = torch.tensor([[449.0, 448.0, 1.0], [2.0**-7, 2.0**-10, 0.0], [9e9, 0.0, 1e-9]])
    counts.add("k", x[None, None])
    assert counts.found["k"] == {"total": 6, "saturated": 1, "subnormal": 2, "flushed": 1}
    assert counts.shares()["k"] == {"saturated": 1 / 6, "subnormal": 2 / 6, "flushed": 1 / 6}


def test_softmax_weights_round_as_by_hand_and_their_sum_does_not() -> None:
    q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, 0.0], [3.0, 0.0], [1.0, 1.0]]]])
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]]])
    core = CachedAttention(Cache(scales={}, rounds_probabilities=True), 0, Counts())
    p = torch.exp(torch.tensor([0.0, 3.0, 1.0]) * 2**-0.5 - 3.0 * 2**-0.5)
    low = (p * 256).to(torch.float8_e4m3fn).float() / 256
    assert not torch.equal(low, p)
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert torch.allclose(core(q, k, v, mask)[0, 0, 0], low @ v[0, 0] / p.sum(), atol=1e-7)
    plain = CachedAttention(Cache(scales={}), 0, Counts())(q, k, v, mask)
    assert torch.allclose(plain, F.scaled_dot_product_attention(q, k, v, mask))


def test_fp8_attention_is_farther_off_than_the_cache_alone() -> None:
    model, given = sharp(), answers()
    one = torch.ones(3, 1)
    exact, gaps = log_probs(model, given), list[float]()
    for cache in (Cache(scales={"k": one, "v": one}), Cache(scales={"q": one, "k": one, "v": one}),
                  Cache(scales={"q": one, "k": one, "v": one}, rounds_probabilities=True)):  # fmt: skip
        with through(model, cache):
            gaps.append(float((log_probs(model, given) - exact).square().mean()))
    assert gaps[0] < gaps[1] < gaps[2]
