"""The cache's layouts, and the quantized cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.api import Plan
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.kv_cache import KVCache, KVScales
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.kv_scales import kv_scale, quantize_kv

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    vocab_size=20, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48
)
PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10]]


def engine_of(kv: str | None, seed: int = 0) -> tuple[EmbeddedEngine, Decoder]:
    """An engine with a quantized cache and nothing else emulated."""
    model = Decoder(CONFIG, torch.Generator().manual_seed(seed), init_std=0.3)
    plan = Plan(rollout_weights=format_named("fp32"), rollout_kv=format_named(kv) if kv else None)
    engine = EmbeddedEngine(CONFIG, plan, eos_id=1, pad_id=0)
    engine.load_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
    return engine, model


def test_cache_equals_a_plain_list_through_growth_and_dropped_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(2, 3, 4, CPU)
    cache.reserve(1, 1, 2)  # memory of an earlier, smaller batch
    cache.reserve(5, 6, 60)
    plain = [[torch.randn(5, 3, 6, 4, generator=generator) for _ in "kv"] for _ in range(2)]
    for layer in range(2):
        for rows in (slice(0, 2), slice(2, 5)):
            cache.fill(layer, *(x[rows] for x in plain[layer]), rows, None)
    for slot in range(6, 60):
        if slot in (9, 30):
            rows = torch.arange(len(plain[0][0]))[::2]
            cache.keep(rows, slot)
            plain = [[x[rows] for x in pair] for pair in plain]
        cache.ensure(slot)
        for layer in range(2):
            new = [torch.randn(len(plain[0][0]), 3, 4, generator=generator) for _ in "kv"]
            cache.append(layer, slot, *new)
            plain[layer] = [torch.cat((x, y[:, :, None]), 2) for x, y in zip(plain[layer], new, strict=True)]
        assert cache.slots <= slot + 1 + max(8, slot // 4)
    for layer in range(2):
        for held, want in zip((cache.k[layer], cache.v[layer]), plain[layer], strict=True):
            assert torch.equal(held[:, :60].unflatten(0, (-1, 3)), want)


def test_fill_repeats_shared_prompts() -> None:
    cache = KVCache(1, 2, 4, CPU)
    cache.reserve(4, 3, 10)
    k, v = torch.randn(2, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    cache.fill(0, k, v, slice(0, 4), torch.tensor([1, 0, 1, 1]))
    assert torch.equal(cache.k[0][:, :3].unflatten(0, (-1, 2)), k[[1, 0, 1, 1]])
    assert torch.equal(cache.v[0][:, :3].unflatten(0, (-1, 2)), v[[1, 0, 1, 1]])


def test_stored_values_are_those_of_the_format() -> None:
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0] = 100.0
    fmt = format_named("e4m3_kv")
    kv = KVScales(fmt, 2, CPU)
    kv.scales[1] = torch.tensor([0.01, 0.5])
    k, v = kv.stored(0, x, y)
    assert torch.equal(k, x.to(torch.float8_e4m3fn).float()) and torch.equal(v, y.to(torch.float8_e4m3fn).float())
    k, v = kv.stored(1, x, y)
    assert torch.equal(k, quantize_kv(x, fmt, torch.tensor(0.01))) and k.abs().max() == pytest.approx(4.48)
    assert torch.equal(v, quantize_kv(y, fmt, torch.tensor(0.5)))
    assert KVScales(None, 2, CPU).stored(0, x, y) == (x, y)


@pytest.mark.parametrize("seed", range(6))  # with some of them a padding slot would hold the largest magnitude
def test_calibration_measures_keys_after_norm_and_rotation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("e4m3_kv", seed)
    seen: list[tuple[torch.Tensor, ...]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append((k.abs().amax(), v.abs().amax()))
        return original(q, k, v, *rest, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        for prompt in PROMPTS:  # the trainer's module, one unpadded prompt at a time: layer 0, layer 1, layer 0, ...
            model(torch.tensor([prompt]))
    engine.calibrate_kv(PROMPTS)
    for layer in range(2):
        for role in range(2):
            amax = torch.maximum(seen[layer][role], seen[2 + layer][role])
            want = kv_scale(amax, format_named("e4m3_kv"))
            torch.testing.assert_close(engine.kv.scales[layer, role], want, rtol=1e-5, atol=0)


def test_a_quantized_cache_moves_log_probs_and_a_bad_scale_moves_them_more() -> None:
    exact, _ = engine_of(None)
    gaps: list[float] = []
    want = exact.generate(PROMPTS, num_samples=8, max_new_tokens=6, temperature=0.0, seed=0)
    for scale in (None, 1e-3):
        engine, _ = engine_of("e4m3_kv")
        engine.calibrate_kv(PROMPTS)
        if scale is not None:
            engine.kv.scales *= scale
        out = engine.generate(PROMPTS, num_samples=8, max_new_tokens=6, temperature=0.0, seed=0)
        gaps.append(float((out.logp[:, 0] - want.logp[:, 0]).abs().max()))
        assert engine.realized_plan().kv == "e4m3_kv"
    assert exact.realized_plan().kv is None
    assert 1e-4 < gaps[0] < 0.3 < gaps[1]


def test_scales_in_the_stream_are_taken_over() -> None:
    engine, model = engine_of("e4m3_kv")
    extra = {
        "model.layers.1.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.5]),
    }
    stream = dict(model.named_parameters()) | extra
    engine.load_weights((name, tensor.detach()) for name, tensor in stream.items())
    assert engine.kv.scales.tolist() == [[1.0, 0.5], [0.25, 1.0]]


def test_scales_that_the_model_has_no_place_for_are_refused_and_change_nothing() -> None:
    engine, model = engine_of("e4m3_kv")
    before = engine.realized_plan()
    other = {name: 2 * tensor.detach() for name, tensor in model.named_parameters()}
    for name, scale, said in (
        ("model.layers.2.self_attn.k_scale", torch.ones(()), "is in the stream, and the model has no such layer"),
        ("x.self_attn.v_scale", torch.ones(()), "is in the stream, and the model has no such layer"),
        ("model.layers.1.self_attn.v_scale", torch.ones(2), "has shape (2,); a scale of the cache is one number"),
    ):
        with pytest.raises(ValueError) as error:
            engine.load_weights(iter((other | {name: scale}).items()))
        assert str(error.value) == f"{name} {said}"
        assert engine.realized_plan() == before and engine.kv.scales.eq(1).all()
