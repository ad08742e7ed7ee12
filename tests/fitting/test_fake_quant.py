"""The trainer's grid is the engine's, bit for bit, in every mode; gradients against torch and against hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.api import QUANTIZED, Plan
from harness.engines.embedded.engine import EmbeddedEngine
from harness.fitting.fake_quant import FakeQuantLinear, ScaleMode, fake_quantized, grid_values, in_range, shipped
from harness.foundation.seeds import generator
from harness.models.adapters import named_weights
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.linear import CastLinear, EmulatedLinear
from harness.numerics.quantize import has_tensor_scale, quantize
from harness.numerics.scales import int_range
from tests.engines.engine_cases import EOS, PAD, decoder

CONFIG = DecoderConfig(
    vocab_size=24, num_layers=2, hidden_size=160, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192
)
FORMATS = (
    "int4_g32", "int4_g32_qat", "int4_g32_asym", "int4_g32_asym_qat", "int3_g32", "int2_g16_asym", "int8_channel",
    "int8_g32", "nvfp4", "nvfp4_torchao", "e4m3_block", "e4m3_channel", "e4m3_tensor", "mxfp4", "nf4",
)  # fmt: skip
CASES: list[tuple[str, ScaleMode]] = [(name, "dynamic") for name in FORMATS]
CASES += [(name, "frozen") for name in FORMATS if name != "nf4"]
CASES += [(name, "learned") for name in FORMATS if name.startswith("int")]


def stream(model: nn.Module, plan: Plan) -> list[tuple[str, Tensor]]:
    """Weight stream after the trainer's part."""
    return list(shipped(((name, tensor.detach()) for name, tensor in named_weights(model)), plan))


def live(engine: EmbeddedEngine, name: str) -> Tensor:
    """Weight that the engine multiplies with, by checkpoint module name."""
    _, _, layer, _, child = name.split(".")
    order = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "gate_up": ("gate_proj", "up_proj"),
             "down": ("down_proj",)}  # fmt: skip
    key = next(key for key, parts in order.items() if child in parts)
    rows = [engine.weights.shapes[f"{name.rpartition('.')[0]}.{part}.weight"][0] for part in order[key]]
    return engine.weights.linears[f"{layer}.{key}"].weight.split(rows)[order[key].index(child)]


def scales_of(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Scales of a slightly different weight, so that frozen ones clip here and there."""
    found: dict[str, Tensor] = {}
    level: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            fmt = plan.rollout_weights
            assert fmt is not None
            q = quantize(module.weight * 0.9, fmt)
            assert q.scale is not None
            parent = name.rpartition(".")[0]
            scale = q.scale if q.global_scale is None else level.setdefault(parent, q.global_scale)
            if has_tensor_scale(fmt) and q.global_scale is None:
                scale = level.setdefault(parent, scale)
            found[f"{name}.weight_scale"] = scale
            if q.zero_point is not None and not fmt.symmetric:
                found[f"{name}.weight_zero_point"] = q.zero_point
    return found


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_engine_and_trainer_share_one_grid(name: str, mode: ScaleMode) -> None:
    plan = Plan(rollout_weights=format_named(name))
    model = decoder(CONFIG, std=0.05)
    with torch.no_grad():  # rows of very different magnitude, so that merged layers differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(torch.randn(len(parameter), 1, generator=generator("cpu", 0, "rows")).exp())
    fixed = {} if mode == "dynamic" else scales_of(model, plan)
    fake_quantized(model, plan, scale_mode=mode, fixed=fixed)
    engine = EmbeddedEngine(CONFIG, plan, eos_id=EOS, pad_id=PAD)
    engine.load_weights(iter(stream(model, plan)))
    engine.realized_plan()
    layers = {at: module for at, module in model.named_modules() if isinstance(module, FakeQuantLinear)}
    assert len(layers) == 7 * CONFIG.num_layers
    for at, layer in layers.items():
        assert torch.equal(layer.values(), live(engine, at)), at
        assert not torch.equal(layer.weight, layer.values())
    # A second push of the same weights changes nothing; a push of the bare latents under given scales does.
    engine.load_weights(iter(stream(model, plan)))
    assert engine.sync_metrics()["code_flip_rate"] == 0.0
    if mode != "dynamic" and not name.startswith("nvfp4"):
        bare = [(n, t.detach()) for n, t in named_weights(model)]
        engine.load_weights(iter(bare))
        assert engine.sync_metrics()["code_flip_rate"] > 0.0


def test_merged_layers_share_their_tensor_scale_and_only_they() -> None:
    plan = Plan(rollout_weights=format_named("nvfp4"), exceptions=(("*.k_proj.weight", None),))
    model = decoder(CONFIG)
    fake_quantized(model, plan)
    at = model.model.layers[0]
    assert type(at.self_attn.k_proj) is nn.Linear and type(model.lm_head) is nn.Linear
    assert at.self_attn.q_proj.merged == at.self_attn.v_proj.merged == ()  # k_proj lies between them
    assert at.mlp.up_proj.merged == at.mlp.gate_proj.merged == (at.mlp.gate_proj, at.mlp.up_proj)
    before = at.mlp.up_proj.values()
    with torch.no_grad():
        at.mlp.gate_proj.weight.mul_(3.0)
    assert not torch.equal(at.mlp.up_proj.values(), before)
    at.mlp.gate_proj.weight = nn.Parameter(at.mlp.gate_proj.weight.detach() / 3.0)  # as FSDP: another tensor
    torch.testing.assert_close(at.mlp.up_proj.values(), before, rtol=0, atol=1e-6)
    twin = copy.deepcopy(model).model.layers[0].mlp
    assert twin.up_proj.merged[0] is twin.gate_proj is not at.mlp.gate_proj


def test_straight_through_gradient_is_that_at_the_rounded_weight() -> None:
    x, g = (torch.randn(5, k, generator=generator("cpu", 0, "x", k)) for k in (64, 32))
    linear = nn.Linear(64, 32)
    layer = FakeQuantLinear(linear, format_named("int4_g32"))
    layer(x).backward(g)
    rounded = nn.Linear(64, 32)
    with torch.no_grad():
        rounded.weight.copy_(layer.values())
        rounded.bias.copy_(linear.bias)
    rounded(x).backward(g)
    assert torch.equal(linear.weight.grad, rounded.weight.grad) and torch.equal(linear.bias.grad, rounded.bias.grad)


def test_forward_is_the_engines_layer() -> None:
    bf16, x = format_named("bf16"), torch.randn(5, 64, generator=generator("cpu", 1, "x"))
    for weights, acts in (("int8_channel", "int8_token"), ("e4m3_channel", "e4m3_token"), ("nvfp4", "nvfp4_act_token")):
        linear = nn.Linear(64, 32)
        layer = FakeQuantLinear(linear, format_named(weights), acts=format_named(acts), base=bf16)
        emulated = EmulatedLinear(
            grid_values(linear.weight, layer.fmt), linear.bias.bfloat16(), acts=layer.acts, base=bf16
        )
        assert torch.equal(layer(x), emulated(x))
        plain = FakeQuantLinear(linear, format_named(weights), base=bf16)
        assert not torch.equal(plain(x), layer(x))
    # Gradients leave as bf16, and without a format the layer would be a CastLinear.
    x.requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(x.grad, x.grad.bfloat16().float())
    assert not torch.equal(CastLinear(linear, bf16)(x), layer(x))


@pytest.mark.parametrize("name", ["int4_g32", "int4_g32_qat", "int3_g32", "int2_g32", "int8_g32", "int8_channel"])
def test_learned_scales_against_torch(name: str) -> None:
    fmt, w = format_named(name), torch.randn(6, 64, generator=generator("cpu", 2, "w"), requires_grad=True)
    scale = quantize(w * 0.7, fmt).scale
    linear = nn.Linear(64, 6, bias=False)
    linear.weight = nn.Parameter(w.detach().clone())
    layer = FakeQuantLinear(linear, fmt, scale_mode="learned", scale=scale, ste_clip=True)
    g = torch.randn(6, 64, generator=generator("cpu", 2, "g"))
    layer.values().backward(g)
    group = fmt.tile[1] or 64
    low, high = int_range(fmt)
    factor = (group * (2 ** (int(name[3]) - 1) - 1)) ** -0.5
    s = scale.detach().reshape(-1).requires_grad_()
    zero = torch.zeros_like(s, requires_grad=True)
    expected = torch._fake_quantize_learnable_per_channel_affine(
        w.reshape(-1, group), s, zero, 0, low, high, grad_factor=factor
    )
    expected.backward(g.reshape(-1, group))
    assert torch.allclose(layer.values().view_as(expected), expected, atol=1e-6)
    inside = in_range(w, fmt, scale, None)
    assert 0 < (~inside).sum() < inside.sum()
    assert torch.equal(linear.weight.grad, w.grad)
    assert torch.allclose(layer.weight_scale.grad.reshape(-1), s.grad, rtol=1e-4, atol=1e-5)


def test_learned_gradient_by_hand_with_a_zero_point() -> None:
    fmt = format_named("int2_g4_asym")  # codes -2..1
    linear = nn.Linear(4, 1, bias=False)
    linear.weight = nn.Parameter(torch.tensor([[0.3, -0.2, 2.0, -3.0]]))
    layer = FakeQuantLinear(linear, fmt, scale_mode="learned", scale=torch.tensor([[0.5]]),
                            zero_point=torch.tensor([[-1]], dtype=torch.int8), ste_clip=True)  # fmt: skip
    # w / s + z = -0.4, -1.4, 3, -7 -> codes 0, -1, 1 (clipped), -2 (clipped) -> (code - z) s
    values = layer.values()
    assert values.tolist() == [[0.5, 0.0, 1.0, -0.5]]
    values.sum().backward()
    by_hand = (1 - 0.6) + (0 + 0.4) + 2 - 1
    assert layer.weight_scale.grad.item() == pytest.approx(by_hand / 4**0.5, abs=1e-6)
    assert linear.weight.grad.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_clipping_of_the_gradient() -> None:
    w, g = torch.tensor([[1.0, 7.4, 7.6, -9.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for clip, expected in ((True, [1.0, 2.0, 0.0, 0.0]), (False, [1.0, 2.0, 3.0, 4.0])):
        linear = nn.Linear(4, 1, bias=False)
        linear.weight = nn.Parameter(w.clone())
        layer = FakeQuantLinear(
            linear, format_named("int4_g4"), scale_mode="frozen", scale=torch.ones(1, 1), ste_clip=clip
        )
        layer.values().backward(g)
        assert linear.weight.grad.tolist() == [expected]
    e4m3 = in_range(torch.tensor([[447.0, 463.0, 465.0]]), format_named("e4m3_tensor"), torch.tensor(1.0), None)
    assert e4m3.tolist() == [[True, True, False]]
    block = torch.tensor([[6.5, -7.5] + [0.0] * 14])
    assert in_range(block, format_named("nvfp4"), None, None).all()
    level = torch.tensor(2688.0 / 6.0)  # the block scale would have to be 448 * 7.5 / 6
    assert in_range(block, format_named("nvfp4"), level, None).tolist()[0][:2] == [True, False]


def test_scales_are_state_and_stay_positive() -> None:
    plan = Plan(rollout_weights=format_named("int4_g32"))
    model = decoder(CONFIG)
    fixed = scales_of(model, plan)
    fake_quantized(model, plan, scale_mode="learned", fixed=fixed)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        dict(model.named_parameters())[name].fill_(-1.0)
    sent = dict(stream(model, plan))
    assert (sent[name] > 0).all() and sent[name.removesuffix("_scale")].abs().max() < 1e-10
    model.load_state_dict(state)
    assert torch.equal(dict(stream(model, plan))[name], fixed[name])


def test_refusals() -> None:
    model, plan = decoder(CONFIG), Plan(rollout_weights=format_named("int4_g32"))
    with pytest.raises(ValueError, match="scale_mode=frozen: format int4_g32 needs its scale"):
        fake_quantized(copy.deepcopy(model), plan, scale_mode="frozen")
    fp8 = replace(plan, rollout_weights=format_named("e4m3_channel"))
    with pytest.raises(ValueError, match="scale_mode=learned: e4m3_channel is no integer"):
        fake_quantized(copy.deepcopy(model), fp8, scale_mode="learned", fixed=scales_of(model, fp8))
    fake_quantized(model, plan)
    with pytest.raises(ValueError, match="q_proj is a FakeQuantLinear already"):
        fake_quantized(model, plan)
    untouched = Decoder(CONFIG, torch.Generator().manual_seed(0))
    assert not any(isinstance(m, FakeQuantLinear) for m in fake_quantized(untouched, Plan()).modules())
    everything = Plan(rollout_weights=format_named("int4_g32"), exceptions=tuple((p, None) for p in QUANTIZED))
    assert not any(isinstance(m, FakeQuantLinear) for m in fake_quantized(untouched, everything).modules())


@pytest.mark.parametrize("mode", ["frozen", "learned"])
def test_one_module_is_held_at_a_time(mode: ScaleMode) -> None:
    """A push of a large model must not hold all of it."""
    plan, model = Plan(rollout_weights=format_named("int4_g32_asym")), decoder(CONFIG, std=0.05)
    fake_quantized(model, plan, scale_mode=mode, fixed=scales_of(model, plan))
    names, asked = [name for name, _ in named_weights(model)], list[str]()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_weights(model):
            asked.append(name)
            yield name, tensor.detach()

    ahead: list[int] = []
    for at, (name, _) in enumerate(shipped(weights(), plan)):
        assert name == names[at]
        ahead.append(len(asked) - at)
    assert len(ahead) == len(names) > 20
    assert max(ahead) == 4  # weight, scale, zero point, and the first of the next module
