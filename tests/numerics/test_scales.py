"""The scale of every rule, by hand: what tells libraries apart, zero tiles, and the table of microscaling bytes."""

from __future__ import annotations

import pytest
import torch

from harness.numerics.formats import format_named
from harness.numerics.quantize import dequantize, quantize
from harness.numerics.scales import int_range, largest_code

AMAX = (6.0, 6.9, 7.0, 7.5, 448.0, 449.0, 1.7499, 1.75, 0.0)
MX_BYTES = {
    "mxfp4_floor": (127, 127, 127, 127, 133, 133, 125, 125, 0),
    "mxfp4_even": (127, 127, 128, 128, 134, 134, 125, 126, 0),
    "mxfp4_ct": (127, 127, 128, 128, 134, 134, 125, 126, 0),
    "mxfp4_rceil": (127, 128, 128, 128, 134, 134, 126, 126, 0),
    "mxfp8_floor": (121, 121, 121, 121, 127, 127, 119, 119, 0),
    "mxfp8_even": (121, 121, 121, 121, 127, 127, 119, 119, 0),
    "mxfp8_rceil": (121, 121, 121, 122, 127, 128, 119, 119, 0),
    "mxfp8_ct": (121, 121, 122, 122, 128, 128, 119, 120, 0),
}


def scale_of(w: torch.Tensor, name: str) -> torch.Tensor:
    scale = quantize(w, format_named(name)).scale
    assert scale is not None
    return scale


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.mark.parametrize("name", MX_BYTES)
def test_microscaling_bytes(name: str) -> None:
    w = torch.zeros(len(AMAX), 32)
    w[:, 5] = -torch.tensor(AMAX)
    assert scale_of(w, name).view(torch.uint8).flatten().tolist() == list(MX_BYTES[name])


def test_microscaling_extremes() -> None:
    w = torch.zeros(4, 32)
    w[0, 0], w[1, 0], w[2, 0], w[3, 0] = 1e-45, 2e38, float("inf"), float("nan")
    for name in MX_BYTES:
        tiny, huge, inf, nan = scale_of(w, name).view(torch.uint8).flatten().tolist()
        assert tiny == 0 and 240 < huge < 255, name
        assert (inf, nan) == (255, 255), name
        assert dequantize(quantize(w, format_named(name)))[:2].isfinite().all(), name


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("e4m3_tensor", 1.0),
        ("e5m2_tensor", 1.0),
        ("e4m3_channel", 1.0 / (448 * 512)),
        ("e4m3_token", 1.0 / (448 * 512)),
        ("e4m3_channel_ct", 2.0**-23),
        ("e4m3_block", 2.0**-23),
        ("e4m3_block_verl", 1e-10 / 448),
        ("e4m3_block_verl_torch", 1.0),
        ("e4m3_block_ue8m0", 2.0**-33),
        ("e4m3_1x128", 1e-10 / 448),
        ("int8_channel", 0.0),
        ("int8_token", 0.0),
        ("int8_channel_ct", 2.0**-23),
        ("int4_g32", 2.0**-23),
        ("int4_g32_asym", 2.0**-23),
        ("int4_g32_qat", 1e-5),
        ("int4_g32_asym_qat", 1e-5),
        ("nvfp4", 0.125),
        ("nvfp4_torchao", 2.0**-6),
        ("mxfp4_ct", 2.0**-127),
        ("mxfp8_rceil", 2.0**-127),
        ("nf4", 0.0),
        ("e4m3_kv", 1e-6),
    ],
)
def test_zero_tiles(name: str, scale: float) -> None:
    q = quantize(torch.zeros(2, 64), format_named(name))
    assert q.scale is not None
    assert q.scale.float().unique().tolist() == [pytest.approx(scale, rel=1e-6, abs=0)]
    assert torch.equal(dequantize(q), torch.zeros(2, 64))
    assert q.codes.float().abs().unique().tolist() == [7.0 if name == "nf4" else 0.0]
    assert q.zero_point is None or not q.zero_point.any()


def test_rules_of_the_128_tile() -> None:
    w = torch.full((128, 128), 0.25)
    w[3, 7] = -1.0
    scales = {name: scale_of(w, f"e4m3_block{name}").item() for name in ("", "_verl", "_verl_torch", "_ue8m0")}
    assert scales[""] == scales["_verl"] == f32(1 / 448)
    assert scales["_verl_torch"] == f32(1 / f32(448.0))
    assert scales["_ue8m0"] == 2.0**-8
    assert scale_of(w * 448, "e4m3_block_ue8m0").item() == 1.0


def test_scale_shapes() -> None:
    w = torch.randn(200, 192)
    shapes = {
        "e4m3_tensor": (), "e4m3_channel": (200, 1), "e4m3_block": (2, 2), "e4m3_1x128": (200, 2), "int4_g32": (200, 6),
        "int4_g128": (200, 2), "nvfp4": (200, 12), "mxfp4": (200, 6), "nf4": (600,), "nf4_dq": (600,),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert scale_of(w, name).shape == shape, name
    assert scale_of(torch.randn(3, 5, 64), "e4m3_token").shape == (3, 5, 1)
    assert scale_of(torch.randn(3, 5, 64), "nvfp4_act_token").shape == (3, 5, 4)
    level = quantize(torch.randn(3, 5, 64), format_named("nvfp4_act_token")).global_scale
    assert level is not None and level.shape == (3, 5, 1)


def test_stored_dtypes() -> None:
    w = torch.randn(64, 64)
    assert scale_of(w, "nvfp4").dtype == torch.float8_e4m3fn
    assert scale_of(w, "mxfp8").dtype == torch.float8_e8m0fnu
    assert scale_of(w, "nf4_dq").dtype == torch.uint8
    codes = {name: quantize(w, format_named(name)).codes.dtype for name in ("int4_g32", "int4_g32_asym_qat", "mxfp8")}
    assert list(codes.values()) == [torch.int8, torch.uint8, torch.float8_e4m3fn]


def test_integer_ranges() -> None:
    names = ("int8_channel", "int8_channel_ct", "int4_g32", "int3_g32_asym", "int2_g32_qat", "int2_g32_asym_qat")
    assert [int_range(format_named(name)) for name in names] == [
        (-128, 127), (-128, 127), (-8, 7), (-4, 3), (-1, 1), (0, 3),
    ]  # fmt: skip
    assert [largest_code(format_named(name)) for name in names[:5]] == [127, 127.5, 7.5, 3.5, 1]


def test_cut_and_ragged_tiles() -> None:
    w = torch.randn(3, 40)
    whole = scale_of(w, "e4m3_block")
    assert whole.shape == (1, 1) and whole.item() == (w.abs().max() / 448).item()
    assert torch.equal(scale_of(w, "int4_g128"), w.abs().amax(-1, keepdim=True) / 7.5)
    parts = torch.stack((w[:, :32].abs().amax(-1), w[:, 32:].abs().amax(-1)), dim=-1) / 7.5
    assert torch.equal(scale_of(w, "int4_g32"), parts)


def test_rceil_is_exact_where_a_division_in_float32_is_not() -> None:
    """The first steps above 6 x 2^k need the next scale; torchao's eager path divides amax by 6 and takes log2 in
    float32, which rounds back to k for some of them."""
    bound, num_kept = torch.tensor(6.0 * 2**10), 0
    for count in range(12):
        w = torch.zeros(1, 32)
        w[0, 3] = bound
        byte = int(scale_of(w, "mxfp4_rceil").view(torch.uint8))
        assert byte == (137 if count == 0 else 138)
        num_kept += count > 0 and int(torch.ceil(torch.log2(bound / 6.0))) == 10
        bound = torch.nextafter(bound, torch.tensor(torch.inf))
    assert 0 < num_kept < 11
