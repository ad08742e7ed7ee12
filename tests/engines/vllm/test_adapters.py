"""Adapters and float32 norm gains beside the weights of a live vLLM engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import KVProtocol, Step
from harness.config.compose import check_passport
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.vllm import engine as engine_module
from harness.engines.vllm import kv, push_by_reload
from harness.engines.vllm.engine import VLLMEngine
from harness.models.decoder import Decoder, tensor_shapes
from harness.numerics.formats import Adapters, format_named
from methods.qerl import AQN
from tests.engines.engine_cases import EOS, PAD, trainer_logp
from tests.engines.vllm.vllm_cases import PROMPTS, SHAPE, LiveEngine, model_of, needs_vllm, plan_of, stream

pytestmark = needs_vllm
ADAPTERS = Adapters(rank=3, alpha=4.5, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
NOISE = AQN(sigma_start=1e-3, sigma_end=1e-4)
FP32 = plan_of("fp32", adapters=ADAPTERS)
FP8 = plan_of("e4m3_channel", "e4m3_token", adapters=ADAPTERS, exceptions=NOISE.plan(plan_of("bf16")).exceptions)


def adapters(seed: int) -> dict[str, Tensor]:
    """One set of random adapters, by checkpoint name."""
    draws, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in tensor_shapes(SHAPE).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTERS.targets:
            found[f"{module}.lora_A.weight"] = 0.1 * torch.randn(ADAPTERS.rank, shape[1], generator=draws)
            found[f"{module}.lora_B.weight"] = 0.1 * torch.randn(shape[0], ADAPTERS.rank, generator=draws)
    return found


def merged(held: dict[str, Tensor]) -> Decoder:
    """The decoder with W + (alpha / rank) B A."""
    model = model_of()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            a = held.get(f"{name.removesuffix('weight')}lora_A.weight")
            if a is not None:
                tensor += ADAPTERS.alpha / ADAPTERS.rank * held[f"{name.removesuffix('weight')}lora_B.weight"] @ a
    return model


def gap(engine: VLLMEngine | EmbeddedEngine, model: Decoder) -> Tensor:
    """[n] log-probs of a float32 decoder less those of the engine's own draws."""
    out = engine.generate(PROMPTS, num_samples=6, max_new_tokens=10, temperature=1.0, seed=1)
    return (trainer_logp(model, PROMPTS, out) - out.logp)[torch.arange(out.logp.shape[1]) < out.lengths[:, None]]


def test_unmerged_adapters_equal_merged_weights_and_the_last_push_alone_acts(live: LiveEngine) -> None:
    engine, first, second = live(FP32), adapters(0), adapters(1)
    for held in (first, second, first):
        engine.load_weights(stream(model_of(), held))
        assert gap(engine, merged(held)).abs().max() < 5e-5
        check_passport(FP32, engine.realized_plan())
    assert gap(engine, merged(second)).abs().mean() > 0.1
    assert gap(engine, model_of()).abs().mean() > 0.1
    assert len(list(Path(engine.folder.name).glob("adapter-*"))) == 1  # old pushes leave nothing on disk
    engine.load_weights(stream(model_of(), {name: torch.zeros_like(tensor) for name, tensor in first.items()}))
    assert gap(engine, model_of()).abs().max() < 2e-5


@pytest.mark.parametrize("protocol", ["trainer", "inference"])
def test_a_cache_is_calibrated_with_the_adapters(live: LiveEngine, protocol: KVProtocol) -> None:
    """In a float32 cache, whose kernel does not read the scales, so on every processor."""
    engine, plan = live(FP32), replace(FP32, rollout_kv=format_named("e4m3_kv"))
    found: list[list[float]] = []
    for held in (adapters(0), adapters(1)):
        ours = EmbeddedEngine(SHAPE, plan, eos_id=EOS, pad_id=PAD)
        for each in (engine, ours):
            each.load_weights(stream(model_of(), held))
        engine.plan = plan
        engine.calibrate_kv(PROMPTS, protocol)
        engine.plan = FP32
        ours.calibrate_kv(PROMPTS, protocol)
        scales = [*kv.all_scales(engine.model).values()]
        found.append([layer[role] for layer in scales for role in kv.ROLES if role != "q"])
        assert found[-1] == pytest.approx(ours.kv.scales.flatten().tolist(), rel=1e-4)
    assert found[0] != pytest.approx(found[1], rel=0.01)
    for module in kv.attentions(engine.model).values():
        kv.set_scales(module, dict.fromkeys(kv.ROLES, 1.0))


def test_adapters_that_do_not_fit_leave_the_old_ones_working(live: LiveEngine) -> None:
    engine, held = live(FP32), adapters(0)
    engine.load_weights(stream(model_of(), held))
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    for bad, said in (
        ({k: v for k, v in held.items() if k != name}, f"weight stream: adapter {name} is missing"),
        (held | {"model.layers.1.self_attn.k_proj.lora_A.weight": torch.zeros(3, 128)},
         "weight stream: adapter model.layers.1.self_attn.k_proj.lora_A.weight is not planned"),
        (held | {name: torch.zeros(128, 4)}, f"{name} has shape (128, 4), the plan needs (128, 3)"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            engine.load_weights(stream(model_of(1), bad))
        assert str(error.value) == said
    assert gap(engine, merged(held)).abs().max() < 5e-5


def test_an_adapter_that_is_not_active_is_found(live: LiveEngine) -> None:
    engine = live(FP32)
    engine.load_weights(stream(model_of(), adapters(0)))
    slot = engine.weights.adapters
    assert slot is not None
    engine.llm.llm_engine.remove_lora(slot.number)
    with pytest.raises(RuntimeError, match=rf"^adapters of pushes \[\] are held, not {slot.number} alone$"):
        engine.realized_plan()


def test_a_target_that_is_no_linear_layer_is_refused_before_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "start", lambda *args, **options: pytest.fail("an engine was started"))
    plan = replace(FP32, adapters=replace(ADAPTERS, targets=("q_proj", "x_proj")))
    with pytest.raises(ValueError, match=r"^adapters.targets: x_proj is no linear layer; choose from down_proj"):
        VLLMEngine(SHAPE, plan, eos_id=EOS, pad_id=PAD)


def test_over_an_fp8_base_both_engines_hold_and_compute_the_same(live: LiveEngine) -> None:
    engine, ours = live(FP8), EmbeddedEngine(SHAPE, FP8, eos_id=EOS, pad_id=PAD)
    for seed in (0, 1):
        held = adapters(seed)
        for each in (engine, ours):
            each.load_weights(stream(model_of(), held))
        passport = engine.realized_plan()
        check_passport(FP8, passport)
        lines = [{r.name: (r.format, r.dtype, r.hash) for r in each.realized_plan().weights} for each in (engine, ours)]
        assert lines[0] == lines[1]
        assert set(passport.acts.values()) == {"e4m3_token"}
        assert lines[0]["model.layers.0.input_layernorm.weight"][0] == "fp32"
        assert lines[0]["model.norm.weight"][0] == "bf16"
        theirs, mine = (gap(each, merged(held)) for each in (engine, ours))
        assert 0.6 < theirs.abs().mean() / mine.abs().mean() < 1.7
        assert gap(engine, model_of()).abs().mean() > 1.5 * theirs.abs().mean()


def test_gains_are_wide_before_anything_has_run_or_been_captured(
    live: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.v1.worker.cpu_worker import CPUWorker

    done, loader = list[str](), DummyModelLoader.load_model
    for owner, name in ((push_by_reload, "widen_gains"), (CPUWorker, "compile_or_warm_up_model")):
        theirs = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, theirs=theirs: (done.append(name), theirs(*args))[1])
    live.close()
    held = dict(live(FP8).model.named_parameters())
    assert done == ["widen_gains", "compile_or_warm_up_model"]
    assert held["model.layers.1.input_layernorm.weight"].dtype == torch.float32
    assert held["model.norm.weight"].dtype == torch.bfloat16
    assert DummyModelLoader.load_model is loader


def test_float32_gains_hold_the_smallest_noise_of_a_schedule(live: LiveEngine) -> None:
    engine, held, memory = live(FP8), adapters(0), dict[str, float]()
    step = Step(index=9, total=10, seed=3)
    engine.load_weights(NOISE.sync(stream(model_of(), held), step, FP8, {}, memory))
    clean, noise = dict(model_of().named_parameters()), list[Tensor]()
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    for name, live_gain in engine.weights.plain():
        if name.endswith(names):
            assert live_gain.dtype == torch.float32
            noise.append(live_gain - clean[name].detach())
    assert len(noise) == 4
    realized = float(torch.cat(noise).std(correction=0))
    assert memory["sigma"] == pytest.approx(1e-4) and realized == pytest.approx(memory["sigma_realized"], rel=1e-5)
    assert realized == pytest.approx(1e-4, rel=0.1)
    rounded: dict[str, float] = {}
    list(NOISE.sync(stream(model_of()), step, plan_of("bf16"), {}, rounded))
    assert abs(rounded["sigma_realized"] / 1e-4 - 1) > 0.5  # a control: 16 bits do not hold it
    engine.realized_plan()
    engine.load_weights(NOISE.sync(stream(model_of(), held), replace(step, purpose="eval"), FP8, {}, memory))
    for name, live_gain in engine.weights.plain():
        if name.endswith(names):
            assert torch.equal(live_gain, clean[name].detach())
