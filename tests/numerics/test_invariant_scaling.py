"""Invariant scaling: the function is kept, on a real decoder and on layers it does not have (experts, MLA, Gemma)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.invariant_scaling import is_power_of_two, role_of, roles, scaled
from harness.numerics.quantize import code_flips, quantize

CONFIG = DecoderConfig(
    vocab_size=40, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def normal(*shape: int, seed: str, scale: float = 1.0) -> Tensor:
    """A float32 matrix of its own seed."""
    return scale * torch.randn(shape, generator=generator("cpu", "invariant scaling", seed))


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    """A decoder with gains and biases that are not 1 and 0."""
    model = Decoder(config, generator("cpu", "invariant scaling"), init_std=0.15)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.add_(normal(*tensor.shape, seed=name, scale=0.2))
    return model


def logits_of(config: DecoderConfig, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The logits of a decoder with these parameters."""
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
        return model(ids)


def rel(a: Tensor, b: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scope", ["all", "qkv"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_the_decoder_keeps_its_function(family: str, scope: str) -> None:
    config = CONFIG if family == "qwen3" else replace(CONFIG, qk_norm=False, attention_bias=True, tie_embeddings=False)
    tensors = {name: tensor.detach() for name, tensor in decoder(config).named_parameters()}
    ids = torch.arange(24).view(2, 12) % 40
    before = logits_of(config, tensors, ids)
    changed = scaled(tensors, 1.5, scope)  # type: ignore[arg-type]
    assert rel(logits_of(config, changed, ids), before) < 1e-6
    moved = {name for name in tensors if changed[name] is not tensors[name]}
    readers = READERS[:3] if scope == "qkv" else READERS
    assert {n for n in moved if n.endswith("proj.weight")} == {
        n for n in tensors if any(n.endswith(f".{r}.weight") for r in readers)
    }
    assert len(moved) == 2 * (4 if scope == "qkv" else 7)
    at = "model.layers.1."
    assert torch.equal(changed[f"{at}self_attn.q_proj.weight"], tensors[f"{at}self_attn.q_proj.weight"] / 1.5)
    assert torch.equal(changed[f"{at}input_layernorm.weight"], tensors[f"{at}input_layernorm.weight"] * 1.5)
    broken = {**changed, f"{at}self_attn.v_proj.weight": tensors[f"{at}self_attn.v_proj.weight"]}
    assert rel(logits_of(config, broken, ids), before) > 1e-3


def test_the_inverse_is_the_reciprocal() -> None:
    tensors = {name: tensor.detach() for name, tensor in decoder().named_parameters()}
    for s in (1.5, 0.7, 3.0):
        back = scaled(scaled(tensors, s), 1 / s)
        for name, tensor in tensors.items():
            torch.testing.assert_close(back[name], tensor, rtol=2.0**-22, atol=0)
    for name, tensor in scaled(scaled(tensors, 2.0), 0.5).items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8_channel", 2e-3), ("e4m3_channel", 2e-3), ("e4m3_block", 2e-3), ("e4m3_tensor", 2e-3), ("nvfp4", 2e-3)],
)
def test_codes_of_absmax_scales_stay(name: str, most: float) -> None:
    fmt = format_named(name)
    w = normal(1024, 512, seed="codes", scale=0.02)
    codes, same = quantize(w, fmt), quantize(w / 1.5, fmt)
    assert code_flips(codes, same) <= most
    assert code_flips(codes, quantize(w / 2.0, fmt)) == 0.0
    assert code_flips(codes, quantize((w / 1.5).bfloat16(), fmt)) > 0.005


def test_codes_under_power_of_two_scales_change() -> None:
    w = normal(256, 512, seed="codes", scale=0.02)
    for name in ("mxfp8", "mxfp4", "e4m3_block_ue8m0"):
        fmt = format_named(name)
        assert code_flips(quantize(w, fmt), quantize(w / 1.5, fmt)) > 0.3
        assert code_flips(quantize(w, fmt), quantize(w / 2.0, fmt)) == 0.0
    assert [is_power_of_two(s) for s in (1.0, 2.0, 0.25, 1.5, 3.0)] == [True, True, True, False, False]


def rms(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float32."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


AT = "model.layers.0."
EXPERTS = {f"{AT}mlp.experts.{e}.{m}.weight" for e in range(6) for m in ("gate_proj", "up_proj", "down_proj")}


def moe_tensors() -> dict[str, Tensor]:
    """A layer with six experts, a shared one and its gate."""
    names = EXPERTS | {f"{AT}mlp.shared_expert.{m}.weight" for m in ("gate_proj", "up_proj", "down_proj")}
    tensors = {n: normal(*((16, 24) if "down" in n else (24, 16)), seed=n, scale=0.3) for n in sorted(names)}
    tensors[f"{AT}mlp.gate.weight"] = normal(6, 16, seed="router")
    tensors[f"{AT}mlp.gate.e_score_correction_bias"] = normal(6, seed="router bias")
    tensors[f"{AT}mlp.shared_expert_gate.weight"] = normal(1, 16, seed="shared gate")
    tensors[f"{AT}input_layernorm.weight"] = 1 + normal(16, seed="first gain", scale=0.1)
    tensors[f"{AT}post_attention_layernorm.weight"] = 1 + normal(16, seed="gain", scale=0.1)
    return tensors


def moe(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(output, routing logits, chosen experts) of that layer."""
    x = rms(x, w[f"{AT}post_attention_layernorm.weight"])

    def expert(at: str) -> Tensor:
        inner = F.silu(x @ w[f"{AT}mlp.{at}.gate_proj.weight"].T) * (x @ w[f"{AT}mlp.{at}.up_proj.weight"].T)
        return inner @ w[f"{AT}mlp.{at}.down_proj.weight"].T

    routing = x @ w[f"{AT}mlp.gate.weight"].T
    top = (routing + w[f"{AT}mlp.gate.e_score_correction_bias"]).topk(2, -1).indices
    share = torch.zeros_like(routing).scatter(-1, top, routing.softmax(-1).gather(-1, top))
    out = sum(share[:, e : e + 1] * expert(f"experts.{e}") for e in range(6))
    return out + (x @ w[f"{AT}mlp.shared_expert_gate.weight"].T).sigmoid() * expert("shared_expert"), routing, top


def test_experts_and_router() -> None:
    tensors, x = moe_tensors(), normal(200, 16, seed="x")
    out, routing, top = moe(x, tensors)
    changed = scaled(tensors, 1.5)
    same, same_routing, same_top = moe(x, changed)
    assert torch.equal(top, same_top) and rel(same_routing, routing) < 1e-6 and rel(same, out) < 1e-6
    forgotten = {**changed, f"{AT}mlp.gate.weight": tensors[f"{AT}mlp.gate.weight"]}
    assert rel(moe(x, forgotten)[1], 1.5 * routing) < 1e-6
    assert not any(name.endswith(("down_proj.weight", "bias")) for name in roles(tensors))
    fused = {f"{AT}mlp.experts.gate_up_proj", f"{AT}mlp.experts.down_proj", f"{AT}mlp.experts.gate_up_proj_bias"}
    norms = {name for name in tensors if "norm" in name}
    assert roles(fused | norms).get(f"{AT}mlp.experts.gate_up_proj") == "reader"
    assert not {f"{AT}mlp.experts.down_proj", f"{AT}mlp.experts.gate_up_proj_bias"} & set(roles(fused | norms))


def test_names_of_other_architectures() -> None:
    def found(norms: str, blocks: str, scope: str = "all") -> dict[str, str]:
        names = [f"{AT}{n}.weight" for n in (norms + " " + blocks).split()]
        named = roles(names, scope)  # type: ignore[arg-type]
        return {name.removeprefix(AT).removesuffix(".weight"): role for name, role in named.items()}

    two = "input_layernorm post_attention_layernorm"
    latent = "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
    assert set(found(two, latent, "qkv")) == {
        "input_layernorm",
        "self_attn.q_a_proj",
        "self_attn.kv_a_proj_with_mqa",
    }
    gemma2 = f"{two} pre_feedforward_layernorm post_feedforward_layernorm"
    assert found(gemma2, "mlp.up_proj mlp.down_proj self_attn.v_proj") == {
        "input_layernorm": "gain",
        "pre_feedforward_layernorm": "gain",
        "mlp.up_proj": "reader",
        "self_attn.v_proj": "reader",
    }
    parallel = found("input_layernorm", "self_attn.q_proj mlp.up_proj mlp.down_proj", "qkv")
    assert set(parallel) == {"input_layernorm", "self_attn.q_proj", "mlp.up_proj"}
    with pytest.raises(ValueError, match=r"layers.0: invariant scaling needs a norm before each block"):
        found("post_attention_layernorm post_feedforward_layernorm", "mlp.up_proj")
    with pytest.raises(ValueError, match=r"linear_attn.in_proj_qkvz.weight: may read a scaled norm"):
        found(two, "linear_attn.in_proj_qkvz")
    with pytest.raises(ValueError, match=r"q_proj.lora_magnitude_vector.weight: may read a scaled norm"):
        found(two, "self_attn.q_proj.lora_magnitude_vector")
    assert role_of("model.norm.weight") is None and role_of(f"{AT}mlp.up_proj.weight", "qkv") is None
    assert role_of(f"{AT}post_attention_layernorm.weight") == "gain"


def test_adapters_scales_and_the_offset_of_a_layer_norm() -> None:
    gain, w, x = 1 + normal(16, seed="g", scale=0.1), normal(8, 16, seed="w"), normal(50, 16, seed="x")
    q = f"{AT}self_attn.q_proj."
    tensors = {
        f"{AT}input_layernorm.weight": gain,
        f"{AT}input_layernorm.bias": normal(16, seed="offset"),
        f"{q}base_layer.weight": w,
        f"{q}base_layer.bias": normal(8, seed="bias"),
        f"{q}lora_A.default.weight": normal(4, 16, seed="a"),
        f"{q}lora_B.default.weight": normal(8, 4, seed="b"),
        f"{q}weight_scale": w.abs().amax(-1, keepdim=True) / 127,
    }

    def output(t: dict[str, Tensor]) -> Tensor:
        y = F.layer_norm(x, (16,), t[f"{AT}input_layernorm.weight"], t[f"{AT}input_layernorm.bias"])
        low = (y @ t[f"{q}lora_A.default.weight"].T) @ t[f"{q}lora_B.default.weight"].T
        return y @ t[f"{q}base_layer.weight"].T + t[f"{q}base_layer.bias"] + low

    changed = scaled(tensors, 1.5)
    assert rel(output(changed), output(tensors)) < 1e-6
    assert (
        rel(output({**changed, f"{q}lora_B.default.weight": tensors[f"{q}lora_B.default.weight"]}), output(tensors))
        > 0.1
    )
    torch.testing.assert_close(changed[f"{q}weight_scale"], changed[f"{q}base_layer.weight"].abs().amax(-1, True) / 127)
    zero = scaled({**tensors, f"{q}lora_B.default.weight": torch.zeros(8, 4)}, 1.5)
    assert torch.equal(zero[f"{q}lora_B.default.weight"], torch.zeros(8, 4))


def test_masters_are_float32_and_bad_input_is_named() -> None:
    name, gain = f"{AT}self_attn.q_proj.weight", f"{AT}input_layernorm.weight"
    tensors = {name: normal(8, 16, seed="w").bfloat16(), gain: torch.ones(16, dtype=torch.bfloat16)}
    changed = scaled(tensors, 1.5)
    assert changed[name].dtype == changed[gain].dtype == torch.float32
    assert torch.equal(changed[name], tensors[name].float() / 1.5)
    assert scaled({n: t.double() for n, t in tensors.items()}, 1.5)[name].dtype == torch.float64
    with pytest.raises(ValueError, match=r"q_proj.weight: is torch.int8"):
        scaled({**tensors, name: torch.zeros(8, 16, dtype=torch.int8)}, 1.5)
    for s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="is not a positive factor"):
            scaled(tensors, s)
