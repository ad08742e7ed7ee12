"""Tensors that a push sends, in compressed-tensors' layout, and their bytes; nothing here starts an engine."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness.api import base_dtype, weight_format
from harness.engines.vllm import memory, settings
from harness.engines.vllm.export import export
from harness.engines.vllm.push_by_kernels import Place, check_scales
from harness.engines.weight_stream import Stream
from harness.models.decoder import tensor_shapes
from harness.numerics.formats import format_named
from harness.numerics.quantize import quantize, receiver_scale
from harness.numerics.rounding import CASTS
from tests.engines.vllm.vllm_cases import SHAPE, model_of, plan_of, pushed_by

FIELDS = [
    ("e4m3_channel", "e4m3_token", "float-quantized", ("float", 8, "channel", None), ("float", 8, "token")),
    ("e4m3_tensor", "e4m3_token", "float-quantized", ("float", 8, "tensor", None), ("float", 8, "token")),
    ("e4m3_block", "e4m3_1x128", "float-quantized", ("float", 8, "block", None), ("float", 8, "group")),
    ("int8_channel", "int8_token", "int-quantized", ("int", 8, "channel", None), ("int", 8, "token")),
    ("int4_g32_qat", None, "pack-quantized", ("int", 4, "group", 32), None),
    ("int4_g128", None, "pack-quantized", ("int", 4, "group", 128), None),
    ("int8_g64", None, "pack-quantized", ("int", 8, "group", 64), None),
    ("nvfp4", None, "nvfp4-pack-quantized", ("float", 4, "tensor_group", 16), None),
]


@pytest.mark.needs_vllm("compressed_tensors")
@pytest.mark.parametrize(("name", "acts", "layout", "weights", "inputs"), FIELDS, ids=[f[0] for f in FIELDS])
def test_compressed_tensors_reads_what_is_meant(name, acts, layout, weights, inputs) -> None:
    from compressed_tensors import quantization

    written = settings.quantization_config(plan_of(name, acts), SHAPE)
    assert written is not None
    read = quantization.QuantizationConfig.model_validate(written)
    scheme = read.config_groups["group_0"]
    assert (read.format, read.quantization_status.value, read.ignore) == (layout, "compressed", ["lm_head"])
    w = scheme.weights
    assert (w.type, w.num_bits, w.strategy, w.group_size) == weights
    assert (w.symmetric, w.dynamic, scheme.targets) == (True, False, ["Linear"])
    assert w.block_structure == ([128, 128] if name == "e4m3_block" else None)
    x = scheme.input_activations
    assert (None if x is None else (x.type, x.num_bits, x.strategy)) == inputs
    assert x is None or (x.dynamic is True and x.symmetric)


@pytest.mark.needs_vllm("compressed_tensors")
@pytest.mark.parametrize(("name", "acts"), [(f[0], f[1]) for f in FIELDS])
def test_exported_tensors_are_those_of_compressed_tensors(name: str, acts: str | None) -> None:
    from compressed_tensors import quantization
    from compressed_tensors.compressors import base as compressors

    plan = plan_of(name, acts)
    written = settings.quantization_config(plan, SHAPE)
    assert written is not None
    scheme = quantization.QuantizationConfig.model_validate(written).config_groups["group_0"]
    pushed, _ = pushed_by(plan, model_of())
    stem = "model.layers.1.mlp.down_proj."
    ours = {key.removeprefix(stem): tensor for key, tensor in pushed.items() if key.startswith(stem)}
    master = dict(model_of().named_parameters())[f"{stem}weight"].detach()
    state = {"weight": master.float(), "weight_scale": ours["weight_scale"].float()}
    if name == "nvfp4":
        state["weight_global_scale"] = ours["weight_global_scale"]
    theirs = compressors.BaseCompressor.get_value_from_registry(written["format"]).compress(state, scheme)
    assert {k: tuple(v.shape) for k, v in theirs.items()} == {k: tuple(v.shape) for k, v in ours.items()}
    codes = "weight_packed" if "weight_packed" in ours else "weight"
    assert theirs[codes].dtype == ours[codes].dtype


def test_a_fused_group_shares_the_tensor_scale_and_order_is_the_models() -> None:
    pushed, _ = pushed_by(plan_of("nvfp4"), model_of())
    scale = {key: float(value) for key, value in pushed.items() if key.endswith("weight_global_scale")}
    at = "model.layers.0.self_attn."
    assert scale[f"{at}q_proj.weight_global_scale"] == scale[f"{at}k_proj.weight_global_scale"]
    assert scale[f"{at}q_proj.weight_global_scale"] == scale[f"{at}v_proj.weight_global_scale"]
    assert scale["model.layers.0.mlp.gate_proj.weight_global_scale"] == scale[
        "model.layers.0.mlp.up_proj.weight_global_scale"]  # fmt: skip
    assert len(set(scale.values())) == 8  # four fused matrices in each of two layers
    tensors = dict(model_of().named_parameters())
    amax = max(float(tensors[f"{at}{part}_proj.weight"].detach().bfloat16().abs().max()) for part in "qkv")
    assert scale[f"{at}q_proj.weight_global_scale"] == pytest.approx(2688 / amax, rel=1e-6)
    modules = list(dict.fromkeys(key.rpartition(".")[0] for key in pushed))
    assert modules == list(dict.fromkeys(key.rpartition(".")[0] for key in tensor_shapes(SHAPE)))


def test_a_part_of_a_fused_matrix_without_its_scale_is_refused() -> None:
    """It would get a scale of its own, of which engines keep one for all."""
    plan, at = plan_of("int8_channel", "int8_token"), "model.layers.0.self_attn."
    tensors = {name: tensor.detach() for name, tensor in model_of().named_parameters()}
    scales = {f"{at}q_proj.weight": torch.ones(len(tensors[f"{at}q_proj.weight"]), 1)}
    stream = Stream(tensors=tensors, scales=scales, zeros={}, adapters={}, kv={})
    with pytest.raises(ValueError, match=r"self_attn\.k_proj\.weight comes without a scale, other parts"):
        export(stream, plan, tensor_shapes(SHAPE), torch.device("cpu"))


@pytest.mark.parametrize(("kind", "acts"), [("nvfp4", None), ("e4m3_tensor", "e4m3_token")])
def test_parts_of_a_fused_matrix_with_one_scale_must_come_with_the_same(kind: str, acts: str | None) -> None:
    """The engine keeps one: codes made under another would stand for other weights."""
    plan, at = plan_of(kind, acts), "model.layers.0.self_attn."
    names = [f"{at}{part}_proj.weight" for part in "qkv"]
    tensors = {name: tensor.detach() for name, tensor in model_of().named_parameters()}
    own = {name: receiver_scale(quantize(tensors[name].bfloat16(), format_named(kind))) for name in names}
    place = Place(codes=torch.zeros(1), scale=torch.zeros(()))
    said = f"{names[0]}_scale: {', '.join(names)} are one fused matrix and must share their scale"
    for scales, is_right in ((own, False), (dict.fromkeys(names, own[names[0]]), True)):
        stream = Stream(tensors=tensors, scales=scales, zeros={}, adapters={}, kv={})
        with nullcontext() if is_right else pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            export(stream, plan, tensor_shapes(SHAPE), torch.device("cpu"))
        with nullcontext() if is_right else pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            check_scales(stream, {"qkv": dict.fromkeys(names, place)})


@pytest.mark.parametrize(
    "name", ["fp32", "bf16", "fp16", "e4m3_channel", "e4m3_tensor", "int8_channel", "int4_g32", "int8_g64", "nvfp4"]
)
def test_bytes_are_those_of_really_packed_tensors(name: str) -> None:
    plan = plan_of(name, exceptions=(("*input_layernorm.weight", format_named("fp32")),))
    pushed, quantized = pushed_by(plan, model_of())
    bytes_held = 0
    for key, tensor in pushed.items():
        if key.endswith("weight_shape"):
            continue  # 16 bytes a matrix, on which no kernel computes
        is_group_scale = "_g" in name and key.endswith("weight_scale")  # sent in 32 bits, held in the engine's dtype
        is_code = any(key.startswith(stem.removesuffix("weight")) for stem in quantized) and not is_group_scale
        fmt = weight_format(plan, key)
        cast = base_dtype(plan) if fmt is None else CASTS.get(fmt.element, torch.float32)
        bytes_held += tensor.numel() * (tensor.itemsize if is_code else cast.itemsize)
    assert memory.weight_bytes(SHAPE, plan) == bytes_held
    assert memory.kv_bytes_per_token(SHAPE, plan) == 2 * 2 * 2 * 64 * (4 if name == "fp32" else 2)
    assert memory.kv_bytes_per_token(SHAPE, replace(plan, rollout_kv=format_named("e4m3_kv"))) == 2 * 2 * 2 * 64


def test_a_model_beyond_the_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    big = replace(SHAPE, hidden_size=4096, intermediate_size=8192, vocab_size=32000)
    memory.check_fits(SHAPE, plan_of("bf16"), torch.device("cuda"), 0.5)
    memory.check_fits(big, plan_of("bf16"), torch.device("cpu"), 0.5)
    with pytest.raises(ValueError, match=r"the model needs 0\.\d GiB for weights and one sequence of 512 tokens; 0.5"):
        memory.check_fits(big, plan_of("bf16"), torch.device("cuda"), 0.5)
    long = replace(SHAPE, max_positions=2**20)  # 1 KiB a token: a sequence of all positions takes the whole GiB
    with pytest.raises(ValueError, match=r"one sequence of 1048576 tokens.*shorter sequences \(engine.max_model_len\)"):
        memory.check_fits(long, plan_of("bf16"), torch.device("cuda"), 0.5)
    memory.check_fits(long, plan_of("bf16"), torch.device("cuda"), 0.5, 2**15)
    with pytest.raises(ValueError, match="one sequence of 1048576 tokens"):
        memory.check_fits(long, plan_of("bf16"), torch.device("cuda"), 0.5, 2**30)


def test_a_small_cache_is_reserved_and_a_large_one_is_left_to_vllm():
    """1 MiB per page of 64 tokens here: 2 layers, 2 heads of 64, K and V, 2 bytes: 1 KiB a token."""
    plan = plan_of("bf16")
    assert memory.kv_bytes_per_token(SHAPE, plan) == 1024
    asked = {"max_num_seqs": 8, "max_model_len": 100, "gpu_memory_utilization": 0.1}
    assert memory.small_cache(SHAPE, plan, asked) == {"kv_cache_memory_bytes": (8 * 2 + 2) * 64 * 1024}
    assert memory.small_cache(SHAPE, plan, asked | {"max_num_seqs": 2**16}) == {}
    on_cpu = {name: value for name, value in asked.items() if name != "gpu_memory_utilization"}
    assert memory.small_cache(SHAPE, plan, on_cpu) == {}
