"""Weights of the embedded engine: loaded as the plan says, tensor by tensor, and nothing else is used."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.api import LINEAR, Passport, weight_format
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.supports import SUPPORTS
from harness.engines.embedded.weights import FUSED
from harness.models.decoder import Decoder, DecoderConfig, tensor_shapes
from harness.numerics.formats import Format, format_named
from harness.numerics.quantize import dequantize, quantize
from tests.engines.engine_cases import PAIRS, WEIGHTS, loaded, plan_of, weights

CONFIG = DecoderConfig(
    vocab_size=20, num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
MOE = replace(CONFIG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def model_of(config: DecoderConfig = CONFIG, seed: int = 0) -> Decoder:
    """Random, with outliers of different size in every tensor so that shared scales show."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config, generator, init_std=0.1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.view(-1)[0] += torch.rand((), generator=generator)
    return model


def live(engine: EmbeddedEngine, name: str) -> Tensor:
    """The rows of the fused matrix that hold a checkpoint's linear layer."""
    *_, part, _ = name.split(".")
    key = ".".join(word for word in name.split(".") if word.isdigit())  # the layer, and an expert's number
    fused = next(fused for fused, parts in FUSED.items() if part in parts)
    shapes = tensor_shapes(engine.config)
    sizes = [shapes[name.replace(part, other)][0] for other in FUSED[fused]]
    matrix = engine.weights.linears[f"{key}.{fused}"].weight
    return matrix.split(sizes)[FUSED[fused].index(part)]


def formats_of(passport: Passport) -> dict[str, str]:
    """Format name by tensor."""
    return {record.name: record.format for record in passport.weights}


def expected(model: Decoder, name: str, fmt: Format) -> Tensor:
    """The values one tensor alone should have, from the written rule: bf16 source, amax shared by merged layers."""
    source = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}
    part = name.split(".")[-2]
    amax = None
    if fmt.name in ("e4m3_tensor", "nvfp4", "nvfp4_torchao"):
        members = next(m for m in LINEAR if part in m)
        amax = torch.stack([source[name.replace(part, m)].float().abs().amax() for m in members]).amax()
    return dequantize(quantize(source[name], fmt, tensor_amax=amax))


@pytest.mark.parametrize(
    ("name", "config"), [*((name, CONFIG) for name in WEIGHTS), *((name, MOE) for name in WEIGHTS[::3])]
)
def test_every_linear_holds_its_own_quantization(name: str, config: DecoderConfig) -> None:
    model, fmt = model_of(config), format_named(name)
    engine = loaded(model, plan_of(name))
    base = {"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)
    found = formats_of(engine.realized_plan())
    assert set(found) == set(tensor_shapes(config))
    for tensor, parameter in model.named_parameters():
        is_linear = tensor.endswith("_proj.weight")
        assert found[tensor] == (
            fmt.name if is_linear else str(base).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        )
        if is_linear:
            want = parameter.detach().to(base).float() if fmt.tile is None else expected(model, tensor, fmt)
            assert torch.equal(live(engine, tensor), want), tensor
    embedding = model.model.embed_tokens.weight.detach()
    assert torch.equal(engine.weights.stacks["embed"], embedding.to(base).float())
    gains = torch.stack([layer.input_layernorm.weight.detach() for layer in model.model.layers])
    assert torch.equal(engine.weights.stacks["input_gain"], gains.to(base).float())
    assert {record.format for record in engine.realized_plan().weights} <= {fmt.name, "bf16", "fp16", "fp32"}
    engine.generate([[3, 4]], num_samples=2, max_new_tokens=3, temperature=1.0, seed=0)
    engine.realized_plan()  # sampling leaves the weights alone


def test_passport_lines_are_the_codes() -> None:
    model = model_of()
    name = "model.layers.1.mlp.up_proj.weight"
    engine = loaded(model, plan_of("int8_channel", "int8_token"))
    record = next(r for r in engine.realized_plan().weights if r.name == name)
    q = quantize(dict(model.named_parameters())[name].detach().to(torch.bfloat16), format_named("int8_channel"))
    assert q.scale is not None
    crc = zlib.crc32(q.scale.numpy().tobytes(), zlib.crc32(q.codes.numpy().tobytes()))
    assert (record.format, record.dtype, record.scale_shape) == ("int8_channel", "int8", (96, 1))
    assert record.hash == f"{crc:08x}"
    shapes = {
        "int4_g32": ("int8", (96, 2)), "e4m3_block": ("float8_e4m3fn", (1, 1)), "nvfp4": ("uint8", (96, 4)),
        "e4m3_tensor": ("float8_e4m3fn", ()), "bf16": ("bfloat16", None), "mxfp4": ("uint8", (96, 2)),
    }  # fmt: skip
    for fmt, (dtype, shape) in shapes.items():
        record = next(r for r in loaded(model, plan_of(fmt)).realized_plan().weights if r.name == name)
        assert (record.dtype, record.scale_shape) == (dtype, shape), fmt
    other = model_of(seed=1)
    hashes = [
        {r.name: r.hash for r in loaded(m, plan_of("bf16")).realized_plan().weights} for m in (model, model, other)
    ]
    assert hashes[0] == hashes[1] and all(hashes[0][n] != hashes[2][n] for n in hashes[0])


@pytest.mark.parametrize(("name", "acts"), PAIRS)
def test_activation_formats_are_read_from_the_layers(name: str, acts: str) -> None:
    engine = loaded(model_of(), plan_of(name, acts))
    passport = engine.realized_plan()
    assert set(passport.acts) == {n for n in tensor_shapes(CONFIG) if n.endswith("_proj.weight")}
    assert set(passport.acts.values()) == {format_named(acts).name}
    plain = loaded(model_of(), plan_of(name))
    if format_named(acts).tile is not None:
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        assert not torch.equal(engine.weights.linears["0.qkv"](x), plain.weights.linears["0.qkv"](x))
        assert set(plain.realized_plan().acts.values()) == {"bf16"}
        engine.weights.linears["1.down"].acts = None
        assert engine.realized_plan().acts["model.layers.1.mlp.down_proj.weight"] == "bf16"


def test_corrupted_or_replaced_weights_are_found() -> None:
    for corrupt in (
        lambda e: e.weights.linears["2.gate_up"].weight[0, 0].add_(1e-3),
        lambda e: e.weights.stacks["norm"].mul_(1.001),
        lambda e: setattr(e.weights.linears["0.out"], "weight", e.weights.linears["0.out"].weight.clone()),
        lambda e: e.weights.stacks["embed"].view(-1)[5].neg_(),
    ):
        engine = loaded(model_of(), plan_of("int4_g32"))
        engine.realized_plan()
        corrupt(engine)
        with pytest.raises(RuntimeError, match=r"was replaced|is not the .* tensor that was loaded"):
            engine.realized_plan()


def test_trainer_updates_do_not_reach_the_engine() -> None:
    model = model_of()
    engine = loaded(model, plan_of("fp32"))
    before = engine.realized_plan()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1.0)
    assert engine.realized_plan() == before


def test_routers_stay_and_exceptions_reach_single_experts() -> None:
    model, int4, router = model_of(MOE), format_named("int4_g32"), "model.layers.1.mlp.gate.weight"
    chosen = "model.layers.0.mlp.experts.2.*"
    plan = replace(plan_of("int8_channel", "int8_token"), exceptions=((chosen, int4), ("*.mlp.gate.weight", None)))
    engine = loaded(model, plan)
    passport = engine.realized_plan()
    found = formats_of(passport)
    assert [name for name, fmt in found.items() if fmt == "int4_g32"] == [
        f"model.layers.0.mlp.experts.2.{part}_proj.weight" for part in ("down", "gate", "up")
    ]
    assert sum(fmt == "int8_channel" for fmt in found.values()) == 3 * (4 + 4 * 3) - 3
    assert found[router] == "bf16" and router not in passport.acts
    live_router = engine.weights.layers[1].router
    assert live_router is not None and live_router.acts is None
    assert torch.equal(live_router.weight, dict(model.named_parameters())[router].detach().bfloat16().float())
    exact = loaded(model, replace(plan, exceptions=(("*.mlp.gate.weight", format_named("fp32")),)))
    assert formats_of(exact.realized_plan())[router] == "fp32"
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate.weight as int4_g32; routers are not quantized; valid: "):
        EmbeddedEngine(MOE, replace(plan, exceptions=(("*.mlp.*", int4),)), eos_id=1, pad_id=0)


def test_exceptions_and_the_head() -> None:
    model = model_of()
    exceptions = (("model.layers.0.*_proj.weight", None), ("*.down_proj.weight", format_named("int8_channel")))
    plan = plan_of("int4_g32", exceptions=exceptions, lm_head=format_named("fp32"))
    engine = loaded(model, plan)
    found = formats_of(engine.realized_plan())
    assert found["lm_head.weight"] == "fp32" and found["model.embed_tokens.weight"] == "bf16"
    assert found["model.layers.0.mlp.down_proj.weight"] == "bf16"  # the first matching pattern wins
    assert found["model.layers.1.mlp.down_proj.weight"] == "int8_channel"
    assert found["model.layers.2.self_attn.q_proj.weight"] == "int4_g32"
    for name, fmt in found.items():
        wanted = weight_format(plan, name)
        assert wanted is None or wanted.name == fmt
    embedding = model.model.embed_tokens.weight.detach()
    assert torch.equal(engine.weights.head.weight, embedding) and engine.weights.head.base == format_named("fp32")
    assert torch.equal(engine.weights.stacks["embed"], embedding.bfloat16().float())
    quantized_head = loaded(model, plan_of("bf16", lm_head=format_named("int8_channel")))
    assert formats_of(quantized_head.realized_plan())["lm_head.weight"] == "int8_channel"
    with pytest.raises(ValueError, match="one fused matrix"):
        EmbeddedEngine(
            CONFIG, plan_of("int8_channel", "int8_token", exceptions=(("*.q_proj.weight", None),)), eos_id=1, pad_id=0
        )


@pytest.mark.parametrize(("name", "base"), [("fp32", "fp32"), ("int8_channel", "bf16")])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_exception_reaches_the_head_tied_or_not(name: str, base: str, is_tied: bool) -> None:
    model, fmt = model_of(replace(CONFIG, tie_embeddings=is_tied)), format_named(name)
    engine = loaded(model, plan_of("int4_g32", exceptions=(("lm_head.*", fmt),)))
    found = formats_of(engine.realized_plan())
    assert (found["lm_head.weight"], found["model.embed_tokens.weight"]) == (name, "bf16")
    source = model.lm_head.weight.detach()
    want = dequantize(quantize(source if fmt.tile is None else source.to(torch.bfloat16), fmt))
    assert torch.equal(engine.weights.head.weight, want) and engine.weights.head.base == format_named(base)


def test_a_format_of_inputs_that_no_layer_would_get_is_refused() -> None:
    """An input is quantized where its weights have a rollout format, be it BF16."""
    none = "rollout_acts=int8_token: no linear layer has a rollout format, so no input would get this one; choose "
    for plan in (
        replace(plan_of("bf16", "int8_token"), rollout_weights=None),
        plan_of("int8_channel", "int8_token", exceptions=(("*", None),)),
    ):
        with pytest.raises(ValueError) as error:
            EmbeddedEngine(CONFIG, plan, eos_id=1, pad_id=0)
        assert str(error.value) == f"{none}precision.weights=bf16 for quantized inputs beside plain weights"
    assert set(loaded(model_of(), plan_of("bf16", "int8_token")).realized_plan().acts.values()) == {"int8_token"}


def test_a_streamed_scale_is_used_as_is() -> None:
    model = model_of()
    fmt = format_named("int8_channel")
    source = {n: p.detach() for n, p in model.named_parameters()}
    scale = {n: quantize(t, fmt).scale for n, t in source.items() if n.endswith("_proj.weight")}
    halved = {n: s * 0.5 for n, s in scale.items() if s is not None}  # half of the range saturates

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.items():
            if name in halved:
                yield f"{name}_scale", halved[name]
            yield name, tensor

    engine = EmbeddedEngine(CONFIG, plan_of("int8_channel", "int8_token"), eos_id=1, pad_id=0)
    engine.load_weights(stream())
    name = "model.layers.1.self_attn.k_proj.weight"
    want = dequantize(quantize(source[name].to(torch.bfloat16), fmt, scale=halved[name]))
    assert torch.equal(live(engine, name), want)
    assert not torch.equal(want, expected(model, name, fmt))
    assert engine.sync_metrics()["saturated_frac"] > 0.02
    with pytest.raises(ValueError, match="comes without a scale"):
        engine.load_weights(item for item in stream() if item[0] != f"{name}_scale")


def test_bad_streams_are_named_and_change_nothing() -> None:
    model = model_of()
    engine = loaded(model, plan_of("int4_g32"))
    before = engine.realized_plan()
    other = dict(weights(model_of(seed=1)))
    norm = "model.norm.weight"
    for stream, words in (
        ({n: t for n, t in other.items() if n != norm}, f"missing {norm}; unexpected none"),
        (other | {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}, "missing none; unexpected model.layers.7"),
        (other | {norm: torch.ones(3)}, r"model.norm.weight has shape \(3,\), the model needs \(64,\)"),
        (other | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)}, "no adapters at the rollout"),
        (other | {"model.layers.0.self_attn.k_scale": torch.ones(())}, "unexpected model.layers.0.self_attn.k_scale"),
        (other | {f"{norm}_scale": torch.ones(1)}, "model.norm.weight_scale is in the stream, and the plan does not"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load_weights(iter(stream.items()))
        assert engine.realized_plan() == before
    with pytest.raises(ValueError, match="twice"):
        engine.load_weights(iter([*other.items(), (norm, other[norm])]))
    engine.load_weights(iter(other.items()))
    assert engine.realized_plan() != before


def test_sync_metrics_count_changed_codes() -> None:
    model = model_of()
    engine = loaded(model, plan_of("int8_channel", "int8_token"))
    assert math.isnan(engine.sync_metrics()["code_flip_rate"])
    assert engine.sync_metrics()["saturated_frac"] == 0.0
    engine.load_weights(weights(model))
    assert engine.sync_metrics()["code_flip_rate"] == 0.0
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.neg_()
    engine.load_weights(weights(model))
    linears = sum(t.numel() for n, t in model.named_parameters() if n.endswith("_proj.weight"))
    changed = model.model.layers[1].mlp.up_proj.weight.numel() / linears
    assert engine.sync_metrics()["code_flip_rate"] == pytest.approx(changed, rel=0.05)


def test_capabilities_cover_the_precisions_and_nothing_odd() -> None:
    for name in WEIGHTS:
        assert f"rollout_weights:{format_named(name).name}" in SUPPORTS
    for _, acts in PAIRS:
        assert f"rollout_acts:{format_named(acts).name}" in SUPPORTS
    assert {"rollout_kv:e4m3_kv", "rollout_kv:e5m2_kv", "sampler:cached", "sampler:trainer"} <= SUPPORTS
    assert "rollout_acts:int4_g32" not in SUPPORTS and "rollout_weights:e4m3_kv" not in SUPPORTS


def test_qwen2_biases_and_an_untied_head_are_loaded() -> None:
    config = replace(CONFIG, qk_norm=False, attention_bias=True, tie_embeddings=False)
    model = model_of(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(generator=torch.Generator().manual_seed(1))
    engine = loaded(model, plan_of("int4_g32"))
    assert set(formats_of(engine.realized_plan())) == set(tensor_shapes(config))
    bias = engine.weights.linears["2.qkv"].bias
    assert bias is not None
    assert torch.equal(bias[64:96], model.model.layers[2].self_attn.k_proj.bias.detach().bfloat16().float())
    assert torch.equal(engine.weights.head.weight, model.lm_head.weight.detach().bfloat16().float())
