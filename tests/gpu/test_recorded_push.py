"""A push of recorded launches writes what launches made one by one write, from the memory it was recorded for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.api import Plan
from harness.engines.vllm import push_by_kernels
from harness.engines.weight_stream import Stream
from harness.numerics.formats import format_named
from harness.numerics.quantize import quantize

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
ROWS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
NAMES = [f"model.layers.0.self_attn.{part}.weight" for part in ROWS]
GAIN = "model.norm.weight"
FORMATS = {
    "e4m3_block": ("e4m3_1x128", (128, 128)),
    "e4m3_tensor": ("e4m3_token", None),
    "int8_channel": ("int8_token", (1, 0)),
}


def tensors(seed: int) -> dict[str, Tensor]:
    """A trainer's weights and a gain, bf16 numbers in float32."""
    draws = torch.Generator("cuda").manual_seed(seed)
    shapes = {**{name: (rows, 256) for name, rows in zip(NAMES, ROWS.values(), strict=True)}, GAIN: (256,)}
    return {
        name: torch.randn(shape, generator=draws, device="cuda").bfloat16().float() for name, shape in shapes.items()
    }


def stream_of(weights: dict[str, Tensor]) -> Stream:
    return Stream(tensors=weights, scales={}, zeros={}, adapters={}, kv={})


def writer_of(weights: str) -> tuple[push_by_kernels.Writer, Tensor, Tensor, Tensor]:
    """A writer, and the codes, scales and gain that it writes."""
    plan = Plan(rollout_weights=format_named(weights), rollout_acts=format_named(FORMATS[weights][0]))
    dtype = torch.int8 if "int8" in weights else torch.float8_e4m3fn
    codes, gain = torch.zeros(512, 256, dtype=dtype, device="cuda"), torch.zeros(256, device="cuda")
    scale = torch.zeros({"e4m3_block": (4, 2), "e4m3_tensor": (), "int8_channel": (512, 1)}[weights], device="cuda")
    places, first = {}, 0
    for name, rows in zip(NAMES, ROWS.values(), strict=True):
        step = 128 if weights == "e4m3_block" else 1
        own = scale[first // step : (first + rows) // step] if scale.ndim else scale
        places[name] = push_by_kernels.Place(codes=codes[first : first + rows], scale=own)
        first += rows
    return push_by_kernels.Writer(plan, {"qkv": places}, [(GAIN, gain)]), codes, scale, gain


def expected(weights: dict[str, Tensor], fmt: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of the reference."""
    whole = torch.cat([weights[name] for name in NAMES])
    made = quantize(whole, format_named(fmt))
    assert made.scale is not None
    return made.codes, made.scale


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_it_writes_what_the_reference_says_at_every_push(fmt: str) -> None:
    writer, codes, scale, gain = writer_of(fmt)
    held = tensors(0)
    for push in range(5):
        for name, new in tensors(push).items():  # as an optimizer does: in place
            held[name].copy_(new)
        writer.write(stream_of(held))
        wanted, scales = expected(held, fmt)
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scale.reshape(-1), scales.reshape(-1).float())
        assert torch.equal(gain, held[GAIN])
        assert (writer.recorded is not None) == (push > 0)


def test_other_memory_is_launched_anew() -> None:
    writer, codes, _, _ = writer_of("e4m3_block")
    held = tensors(1)
    for _ in range(3):
        writer.write(stream_of(held))
    assert writer.recorded is not None
    other = tensors(2)
    writer.write(stream_of(other))
    assert torch.equal(codes.view(torch.uint8), expected(other, "e4m3_block")[0].view(torch.uint8))
    held[NAMES[0]].mul_(-1.0)
    writer.write(stream_of(held))
    assert torch.equal(codes.view(torch.uint8), expected(held, "e4m3_block")[0].view(torch.uint8))


def test_given_scales_are_read_at_every_push() -> None:
    writer, codes, scale, _ = writer_of("e4m3_block")
    held = tensors(3)
    given = {
        name: torch.full((rows // 128, 2), 0.5, device="cuda") for name, rows in zip(NAMES, ROWS.values(), strict=True)
    }
    stream = Stream(tensors=held, scales=given, zeros={}, adapters={}, kv={})
    for value in (0.5, 0.25, 0.125):
        for own in given.values():
            own.fill_(value)
        writer.write(stream)
        assert bool((scale == value).all())
        whole = torch.cat([held[name] for name in NAMES])
        wanted = quantize(whole, format_named("e4m3_block"), scale=torch.full((4, 2), value, device="cuda")).codes
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
