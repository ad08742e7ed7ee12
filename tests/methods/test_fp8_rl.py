"""FP8-RL: K and V scales that follow the weights, by both protocols, and what stale ones do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.api import Plan, Rollout, Sequences, Site, Step
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig, response_hidden
from harness.numerics.formats import format_named
from harness.numerics.kv_scales import scale_names
from methods.fp8_rl import RecalibratedKV, spread_rows
from methods.jet_rl import FP8Flow

BLOCKS = Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"))
KV8 = replace(BLOCKS, rollout_kv=format_named("e4m3_kv"))
ONLY_KV = Plan(rollout_weights=format_named("fp32"), rollout_kv=format_named("e4m3_kv"))
STEP = Step(index=0, total=4, seed=0)
LENGTHS = (5, 9, 7, 9)
NAMES = [scale_names(i)[role] for i in (0, 1) for role in ("k", "v")]
BATCH: Any = None  # the part reads token ids alone


def decoder(std: float = 0.12) -> Decoder:
    """A small random decoder."""
    config = DecoderConfig(
        vocab_size=64, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
    )
    return Decoder(config, generator=generator("cpu", 0, "kv"), init_std=std)


def prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths."""
    drawn = torch.randint(1, 64, (len(LENGTHS), 9), generator=generator("cpu", 0, "prompts")).tolist()
    return [tuple(row[:length]) for row, length in zip(drawn, LENGTHS, strict=True)]


def refuse(*args: object, **kwargs: object) -> Any:
    """For what must not be called."""
    raise AssertionError("called")


def site(model: nn.Module, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **values: Any) -> Site:
    """A site whose checkpoint is `model`; the fields that this part leaves alone refuse."""
    given = {
        "checkpoint": Path("base"), "calibration": tuple(prompts()), "seed": 0, "wrap": wrap, "fixed": {},
        "build": lambda folder: model if folder == Path("base") else refuse(),
    } | values  # fmt: skip
    return Site(**{name: given.get(name, refuse) for name in Site.__dataclass_fields__})


def sequences(rows: int = 4, new: int = 3) -> Sequences:
    """Right-padded prompts with `new` response tokens each; padding is token 0."""
    ids = torch.zeros(rows, 9 + new, dtype=torch.int64)
    lens = torch.tensor([LENGTHS[i % 4] for i in range(rows)])
    for i, length in enumerate(lens.tolist()):
        ids[i, : length + new] = torch.randint(1, 64, (length + new,), generator=generator("cpu", i, "rows"))
    tokens = ids.gather(1, lens[:, None] + torch.arange(new))
    return Sequences(ids=ids, prompt_lens=lens, token_ids=tokens, sampled=torch.ones(rows, new, dtype=torch.bool))


def stream(model: Decoder, part: RecalibratedKV, fixed: Mapping[str, Tensor], plan: Plan = KV8) -> Any:
    """Weight stream that reaches the engine."""
    weights = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    return part.sync(weights, STEP, plan, fixed, {})


def engine_of(model: Decoder, fixed: Mapping[str, Tensor], plan: Plan = ONLY_KV) -> EmbeddedEngine:
    """An engine after a sync."""
    engine = EmbeddedEngine(model.config, plan, eos_id=-1, pad_id=0)
    engine.load_weights(stream(model, RecalibratedKV(), fixed, plan))
    return engine


def table(fixed: Mapping[str, Tensor]) -> Tensor:
    """Scales [layers, 2] in the engine's order."""
    return torch.stack([fixed[name] for name in NAMES]).view(2, 2)


def test_trainer_scales_are_the_engines_own_on_equal_sequences() -> None:
    model = decoder()
    _, fixed = RecalibratedKV().prepare(site(model), ONLY_KV)
    assert list(fixed) == NAMES and all(scale.shape == () and scale.dtype == torch.float32 for scale in fixed.values())
    engine = engine_of(model, {})
    assert torch.equal(engine.kv.scales, torch.ones(2, 2))
    engine.calibrate_kv(prompts(), "trainer")
    torch.testing.assert_close(table(fixed), engine.kv.scales, rtol=1e-5, atol=0)
    _, wide = RecalibratedKV(margin=2.1).prepare(site(model), ONLY_KV)
    torch.testing.assert_close(table(wide), 2 * table(fixed))


def test_sent_scales_are_those_the_engine_uses() -> None:
    model, part = decoder(), RecalibratedKV()
    _, fixed = part.prepare(site(model), KV8)
    engine = engine_of(model, fixed, KV8)
    assert torch.equal(engine.kv.scales, table(fixed))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(3.0)
    seqs, memory = sequences(), dict[str, float]()
    fresh = part.refit(model, seqs, BATCH, STEP, KV8, fixed, memory)
    assert fresh is not None
    engine.load_weights(stream(model, part, fresh))
    assert torch.equal(engine.kv.scales, table(fresh))
    assert table(fresh)[0, 1] > 2 * table(fixed)[0, 1]
    assert memory["v_scale_max"] == table(fresh)[:, 1].max() and memory["k_scale_min"] == table(fresh)[:, 0].min()
    again = engine.generate(prompts(), num_samples=1, max_new_tokens=4, temperature=1.0, seed=0)
    other = engine_of(model, fresh, KV8).generate(prompts(), num_samples=1, max_new_tokens=4, temperature=1.0, seed=0)
    assert torch.equal(again.logp, other.logp)  # nothing of the old cache is left


def test_padding_and_rows_that_are_not_chosen_do_not_count() -> None:
    model, part = decoder(), RecalibratedKV()
    seqs = sequences()
    fixed = part.refit(model, seqs, BATCH, STEP, KV8, {}, {})
    assert fixed is not None
    with torch.no_grad():
        values = model.model.layers[0].self_attn.v_proj.weight
        model.model.embed_tokens.weight[0] = values[0] * 50  # what gives the largest V there can be
    same = part.refit(model, seqs, BATCH, STEP, KV8, {}, {})
    assert same is not None and torch.equal(table(same), table(fixed))
    unpadded = replace(seqs, prompt_lens=9)
    changed = part.refit(model, unpadded, BATCH, STEP, KV8, {}, {})
    assert changed is not None and not torch.equal(table(changed), table(fixed))
    few = RecalibratedKV(rows=2).refit(model, seqs, BATCH, STEP, KV8, {}, {})
    chosen = part.refit(model, seqs.take(torch.tensor([0, 2])), BATCH, STEP, KV8, {}, {})
    assert few is not None and chosen is not None and torch.equal(table(few), table(chosen))
    assert spread_rows(8, 4) == [0, 2, 4, 6] and spread_rows(3, 32) == [0, 1, 2] and spread_rows(0, 4) == []


def test_percentile_over_micro_batches() -> None:
    model, seqs = decoder(), sequences(5)
    single = [
        table(RecalibratedKV().refit(model, seqs.take(torch.tensor([i])), BATCH, STEP, KV8, {}, {}) or {})
        for i in range(5)
    ]
    ordered = torch.stack(single).sort(0).values
    for percentile, index in ((0.0, 0), (0.5, 2), (0.7, 3), (0.999, 4)):
        part = RecalibratedKV(micro_rows=1, percentile=percentile)
        found = part.refit(model, seqs, BATCH, STEP, KV8, {}, {})
        assert found is not None
        torch.testing.assert_close(table(found), ordered[index], rtol=1e-5, atol=0)


def mismatch(model: Decoder, fixed: Mapping[str, Tensor], scale: float = 1.0) -> float:
    """Mean k3 estimate of KL(sampler || trainer), nats, of an FP8 cache alone."""
    engine = engine_of(model, {name: value * scale for name, value in fixed.items()})
    batch = [p[:5] for p in prompts()] * 8
    out = engine.generate(batch, num_samples=1, max_new_tokens=24, temperature=1.0, seed=0)
    with torch.no_grad():
        logits = model.head(response_hidden(model, torch.cat((torch.tensor(batch), out.token_ids), 1), 5, 24))
    d = logits.log_softmax(-1).gather(-1, out.token_ids[..., None])[..., 0] - out.logp
    return float((d.expm1() - d).mean())


def test_a_hundredth_of_the_scales_is_seen_in_the_mismatch() -> None:
    model = decoder()
    _, fixed = RecalibratedKV().prepare(site(model), ONLY_KV)
    good, default, bad = mismatch(model, fixed), mismatch(model, {}), mismatch(model, fixed, 0.01)
    assert 0 < good < 0.01 and bad > 30 * good
    assert default < bad


class Recorder:
    """An engine that remembers what it is asked to calibrate."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, str]] = []

    def calibrate_kv(self, prompts: object, protocol: str) -> None:
        """Remember."""
        self.asked.append((prompts, protocol))


def test_inference_protocol_asks_the_engine() -> None:
    part, model, recorder = RecalibratedKV(protocol="inference"), decoder(), Recorder()
    part.after_sync(recorder, prompts())  # type: ignore[arg-type]
    assert recorder.asked == [(prompts(), "inference")]
    RecalibratedKV().after_sync(recorder, prompts())  # type: ignore[arg-type]
    assert len(recorder.asked) == 1
    assert part.prepare(site(model, build=refuse), KV8) == (None, {})
    assert part.refit(model, sequences(), BATCH, STEP, KV8, {}, {}) is None
    stale = {name: torch.tensor(1.0) for name in NAMES}
    assert not any(name.endswith("_scale") for name, _ in stream(model, part, stale))
    engine = engine_of(model, {})
    part.after_sync(engine, prompts())
    _, fixed = RecalibratedKV(margin=1.0).prepare(site(model), ONLY_KV)
    expected = table(fixed) * 448 / torch.tensor([200.0, 100.0])
    torch.testing.assert_close(engine.kv.scales, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("protocol", ["trainer", "inference"])
def test_without_a_quantized_cache_nothing_happens(protocol: Any) -> None:
    part, model = RecalibratedKV(protocol=protocol), decoder()
    assert part.prepare(site(model, build=refuse), BLOCKS) == (None, {})
    memory = dict[str, float]()
    assert part.refit(model, sequences(), BATCH, STEP, BLOCKS, {}, memory) is None and not memory
    names = [name for name, _ in stream(model, part, {name: torch.tensor(1.0) for name in NAMES}, BLOCKS)]
    assert names == [name for name, _ in model.named_parameters()]
    engine = engine_of(model, {}, BLOCKS)
    part.after_sync(engine, prompts())
    assert engine.realized_plan().kv is None


def test_end_to_end_scales_are_of_the_wrapped_module() -> None:
    model = decoder()
    flow = FP8Flow()
    _, plain = RecalibratedKV().prepare(site(model), KV8)
    _, fixed = RecalibratedKV().prepare(site(model, wrap=lambda m: flow.wrap(m, KV8, {})), KV8)
    engine = engine_of(decoder(), fixed, KV8)
    engine.calibrate_kv(prompts(), "trainer")
    torch.testing.assert_close(table(fixed), engine.kv.scales, rtol=2e-3, atol=0)
    assert not torch.allclose(table(plain), engine.kv.scales, rtol=2e-3, atol=0)


def test_bad_knobs() -> None:
    for name, value in (("rows", 0), ("micro_rows", 0), ("percentile", 99.9), ("margin", 0.0)):
        with pytest.raises(ValueError, match=rf"RecalibratedKV\..*{name}.*\(choose"):
            RecalibratedKV(**{name: value})


def test_rollouts_have_finite_log_probs_at_both_cache_formats() -> None:
    model = decoder()
    for kv in ("e4m3_kv", "e5m2_kv"):
        plan = replace(KV8, rollout_kv=format_named(kv))
        _, fixed = RecalibratedKV().prepare(site(model), plan)
        out: Rollout = engine_of(model, fixed, plan).generate(
            prompts(), num_samples=2, max_new_tokens=6, temperature=1.0, seed=0
        )
        assert bool(torch.isfinite(out.logp).all())


@pytest.mark.gpu
def test_gpu_scales_are_the_cpus() -> None:
    model, seqs = decoder(), sequences()
    want = RecalibratedKV().refit(model, seqs, BATCH, STEP, KV8, {}, {})
    lens = seqs.prompt_lens
    assert isinstance(lens, Tensor) and want is not None
    there = Sequences(
        ids=seqs.ids.cuda(), prompt_lens=lens.cuda(), token_ids=seqs.token_ids.cuda(), sampled=seqs.sampled.cuda()
    )
    found = RecalibratedKV().refit(model.cuda(), there, BATCH, STEP, KV8, {}, {})
    assert found is not None
    torch.testing.assert_close(table(found).cpu(), table(want), rtol=1e-4, atol=0)
    engine = EmbeddedEngine(model.config, KV8, eos_id=-1, pad_id=0, device="cuda")
    engine.load_weights(stream(model, RecalibratedKV(), found))
    assert torch.equal(engine.kv.scales, table(found))
