"""Golden vectors of every grid, its expected error on a Gaussian matrix, and the gauges of frozen scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.numerics.formats import FORMATS, Format, format_named
from harness.numerics.packing import pack_fp4
from harness.numerics.quantize import (
    Quantized,
    code_flips,
    dequantize,
    fake_quantize,
    has_tensor_scale,
    merged_amax,
    quantize,
    receiver_scale,
    saturated_frac,
)
from tests.numerics.format_cases import PATHS, SCALED, by_name

ERRORS = {
    "int8_channel": 0.0083, "e4m3_tensor": 0.0265, "e4m3_channel": 0.0264, "e4m3_block": 0.0264,
    "e4m3_block_ue8m0": 0.0266, "e5m2_tensor": 0.0527, "mxfp8_floor": 0.0292, "mxfp8_rceil": 0.0266,
    "mxfp8_ct": 0.0266, "nvfp4": 0.0951, "nvfp4_torchao": 0.0951, "mxfp4_floor": 0.1139, "mxfp4_rceil": 0.1184,
    "nf4": 0.0920, "nf4_dq": 0.0920, "int4_g128": 0.1111,
}  # fmt: skip
"""Relative Frobenius error on 0.02 N(0, 1) rounded to bf16, 1024 x 2048, as measured once with the libraries."""


def named(w: Tensor, name: str) -> Quantized:
    return quantize(w, format_named(name))


def scale_of(q: Quantized) -> Tensor:
    assert q.scale is not None
    return q.scale


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    noise = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    return (0.02 * noise).to(torch.bfloat16).float()


@pytest.mark.parametrize("name", ERRORS)
def test_expected_error(name: str, gaussian: Tensor) -> None:
    error = (fake_quantize(gaussian, format_named(name)) - gaussian).norm() / gaussian.norm()
    assert error.item() == pytest.approx(ERRORS[name], rel=0.02)


@pytest.mark.parametrize(("name", "error"), [("bf16", 0.00166), ("fp16", 0.00021)])
def test_expected_error_of_casts(name: str, error: float) -> None:
    w = 0.02 * torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1))
    assert ((fake_quantize(w, format_named(name)) - w).norm() / w.norm()).item() == pytest.approx(error, rel=0.02)


def test_e4m3_tensor_multiplies_by_the_reciprocal() -> None:
    w = torch.tensor([[1.0, -0.5, 0.25, 0.1], [0.0, 0.0, 0.0, 0.0]])
    q = named(w, "e4m3_tensor")
    assert scale_of(q).shape == () and scale_of(q).item() == pytest.approx(1 / 448)
    assert q.codes.float().tolist() == [[448, -224, 112, 44], [0, 0, 0, 0]]
    frozen = quantize(w, q.fmt, scale=torch.tensor(1 / 224))
    assert frozen.codes.float().tolist() == [[224, -112, 56, 22], [0, 0, 0, 0]]


def test_e4m3_channel_golden() -> None:
    q = named(torch.tensor([[1.0, -0.5, 0.25, 0.1]]), "e4m3_channel")
    assert scale_of(q).tolist() == [[pytest.approx(1 / 448)]]
    assert q.codes.float().tolist() == [[448, -224, 112, 44]]


def test_int8_goldens_of_both_conventions() -> None:
    ct = named(torch.tensor([[1.0, -0.5, 0.25, 0.1], [-2.0, 0.0, 0.0, 0.0]]), "int8_channel_ct")
    assert scale_of(ct)[0].item() == pytest.approx(0.0078431377, rel=1e-7)
    assert ct.codes.tolist() == [[127, -64, 32, 13], [-127, 0, 0, 0]]
    kernel = named(torch.tensor([[0.3, -1.27, 0.005, 0.635, 1.0]]), "int8_token")
    assert scale_of(kernel).item() == pytest.approx(0.01)
    assert kernel.codes.tolist() == [[30, -127, 0, 64, 100]]


def test_int4_symmetric_and_asymmetric() -> None:
    w = torch.tensor([[7.5, -7.5, 0.4, 0.6, 1.5, 2.5, -1.0, 0.0]])
    q = named(w, "int4_g8")
    assert scale_of(q).tolist() == [[1.0]]
    assert q.codes.tolist() == [[7, -8, 0, 1, 2, 2, -1, 0]]
    asym = named(torch.tensor([[-3.0, 12.0, 0.0, 5.4]]), "int4_g4_asym")
    assert (scale_of(asym).tolist(), asym.codes.tolist()) == ([[1.0]], [[-8, 7, -5, 0]])
    assert asym.zero_point is not None and asym.zero_point.tolist() == [[-5]]
    assert dequantize(asym).tolist() == [[-3, 12, 0, 5]]
    positive = named(torch.tensor([[3.0, 15.0, 6.0, 9.0]]), "int4_g4_asym")
    assert dequantize(positive).tolist() == [[3, 15, 6, 9]]


def test_int4_of_the_qat_stacks() -> None:
    q = named(torch.tensor([[7.0, -7.0, 0.5, 1.5]]), "int4_g4_qat")
    assert (scale_of(q).tolist(), q.codes.tolist()) == ([[1.0]], [[7, -7, 0, 2]])
    asym = named(torch.tensor([[-3.0, 12.0, 0.0, 5.4]]), "int4_g4_asym_qat")
    assert (scale_of(asym).tolist(), asym.codes.tolist()) == ([[1.0]], [[0, 15, 3, 8]])
    assert dequantize(asym).tolist() == [[-3, 12, 0, 5]]


def nvfp4_golden() -> Tensor:
    w = torch.zeros(2, 32)
    i = torch.arange(16, dtype=torch.float32)
    w[0, :16] = 0.1 * (i + 1) * (-1) ** i
    w[0, 16:] = 0.01 * (i + 1)
    w[1, 16], w[1, 17:] = 3.0, 1.0
    return w


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_act", "nvfp4_torchao"])
def test_nvfp4_golden(name: str) -> None:
    q = named(nvfp4_golden(), name)
    packed = [row.numpy().tobytes().hex() for row in pack_fp4(q.codes)]
    assert packed == ["91b2c4d5e5e6f6f71132445565667677", "00000000000000004744444444444444"]
    assert q.global_scale is not None
    assert q.global_scale.item() == pytest.approx(3 / 2688 if name == "nvfp4_torchao" else 896)
    zero_block = 2.0**-6 if name == "nvfp4_torchao" else 0.125
    assert scale_of(q).float().tolist() == [[240, 24], [zero_block, 448]]


@pytest.mark.parametrize(
    ("name", "byte", "packed"),
    [
        ("mxfp4_floor", 126, "90a1a2b3c4c4d5d5e5e6e6e6f6f7f7f7"),
        ("mxfp4_rceil", 127, "809191a1a2a2b3b3c3c4c4c4d4d5d5d5"),
    ],
)
def test_mxfp4_golden(name: str, byte: int, packed: str) -> None:
    i = torch.arange(32, dtype=torch.float32)
    q = named(((-1) ** i * 0.1 * (i + 1)).unsqueeze(0), name)
    assert scale_of(q).view(torch.uint8).tolist() == [[byte]]
    assert pack_fp4(q.codes).numpy().tobytes().hex() == packed


def test_nf4_golden() -> None:
    q = named(torch.linspace(-1, 1, 64) * 0.37, "nf4")
    assert scale_of(q).tolist() == [pytest.approx(0.37)]
    assert "".join(f"{code:x}" for code in q.codes.flatten().tolist()) == (
        "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff"
    )


@by_name(PATHS)
def test_fake_quantize_is_dequantized_quantization_at_any_shape(fmt: Format) -> None:
    noise = torch.Generator().manual_seed(2)
    for shape in ((64, 96), (3, 5, 48), (130, 7), (1, 200)):
        x = torch.randn(shape, generator=noise).to(torch.bfloat16)
        x.view(-1, shape[-1])[0] = 0.0
        assert torch.equal(fake_quantize(x, fmt), dequantize(quantize(x, fmt))), shape


@by_name([fmt for fmt in SCALED if not fmt.double_quant and fmt.rule != "ct_token"])
def test_own_scales_given_back_change_nothing(fmt: Format) -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    q = quantize(w, fmt)
    again = quantize(w, fmt, scale=q.scale, zero_point=q.zero_point, tensor_amax=w.abs().max())
    if fmt.rule == "int_kernel":  # x * (127 / amax) against x * (1 / scale): the last bit may move a tie
        assert float(code_flips(q, again)) < 1e-3
    else:
        assert float(code_flips(q, again)) == 0.0
        assert torch.equal(dequantize(again), dequantize(q))


@pytest.mark.parametrize("columns", [8, 16, 32, 200])
def test_levels_of_tokens_come_back_as_levels_at_any_width(columns: int) -> None:
    """With 16 columns and fewer there is one block a token: the levels have the shape of block scales."""
    fmt = format_named("nvfp4_act_token")
    x = torch.randn(3, 5, columns, generator=torch.Generator().manual_seed(6))
    x[0] *= 40.0
    q = quantize(x, fmt)
    levels = receiver_scale(q)
    assert levels.shape == (3, 5, 1) and levels.dtype == torch.float32 and levels.unique().numel() == 15
    for values in (x, dequantize(q)):
        again = quantize(values, fmt, scale=levels)
        assert float(code_flips(q, again)) == 0.0 and torch.equal(dequantize(again), dequantize(q))
    assert not torch.equal(dequantize(quantize(x, fmt, scale=2 * levels)), dequantize(q))
    for wrong in (scale_of(q), levels.squeeze(-1), levels.double()):
        with pytest.raises(ValueError, match=r"format nvfp4_act_token: scale .* is not the levels of its tokens"):
            quantize(x, fmt, scale=wrong)


def test_frozen_tensor_level_scale_of_nvfp4_keeps_blocks_dynamic() -> None:
    x = nvfp4_golden()
    frozen = quantize(x, format_named("nvfp4_act"), scale=torch.tensor([448.0]))
    assert scale_of(frozen).float().tolist() == [[120, 12], [0.125, 224]]
    assert torch.equal(fake_quantize(x, frozen.fmt, scale=torch.tensor(448.0)), dequantize(frozen))


def test_merged_layers_share_the_tensor_scale() -> None:
    parts = [torch.randn(32, 64, generator=torch.Generator().manual_seed(s)) * (s + 1) for s in range(3)]
    amax = torch.stack([p.abs().max() for p in parts]).max()
    for name in ("nvfp4", "nvfp4_torchao", "e4m3_tensor", "e5m2_tensor"):
        assert has_tensor_scale(format_named(name))
        whole = named(torch.cat(parts), name)
        split = [quantize(p, whole.fmt, tensor_amax=amax) for p in parts]
        assert torch.equal(torch.cat([dequantize(q) for q in split]), dequantize(whole))
    for name in ("bf16", "e4m3_channel", "e4m3_block", "int8_channel", "mxfp4", "nf4", "e4m3_kv", "nvfp4_act_token"):
        assert not has_tensor_scale(format_named(name))


def test_saturation_counts_what_frozen_scales_clip() -> None:
    w = torch.linspace(-1.27, 1.27, 255).unsqueeze(0)
    q = named(w, "int8_channel")
    assert saturated_frac(w, q) == 0.0
    grown = w.clone()
    grown[0, :3] = torch.tensor([-1.29, 1.27, 1.28])
    frozen = quantize(grown, q.fmt, scale=q.scale)
    # -1.29 lies beyond -128.5 steps of 0.01; 1.28 beyond 127.5.
    assert saturated_frac(grown, frozen) == pytest.approx(2 / 255)
    e4m3 = named(w, "e4m3_channel")
    doubled = quantize(w * 2, e4m3.fmt, scale=e4m3.scale)
    beyond = (w * 2 / scale_of(e4m3)).abs() > 464
    assert saturated_frac(w * 2, doubled) == beyond.float().mean().item() > 0.4


def test_saturation_is_none_under_dynamic_scales() -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    for name in ("bf16", "e4m3_tensor", "int4_g32", "int3_g32_asym", "nvfp4", "mxfp4_rceil", "mxfp8_ct", "nf4"):
        assert saturated_frac(w, named(w, name)) == 0.0, name
    assert 0.0 < saturated_frac(w, named(w, "mxfp4_floor")) < 0.05


def test_code_flips_of_an_rl_sized_update(gaussian: Tensor) -> None:
    """A step of 1e-6 per weight moves about mean(|step|) * 127 / amax of the INT8 codes: most updates change nothing.
    Weights rounded to bf16 lie on ties of the grid more often and flip a little more."""
    step = 1e-6 * (torch.randint(0, 2, gaussian.shape, generator=torch.Generator().manual_seed(5)) * 2.0 - 1)
    for name, flips in (("int8_channel", 0.0021), ("e4m3_channel", 0.0055)):
        found = float(code_flips(named(gaussian, name), named(gaussian + step, name)))
        assert found == pytest.approx(flips, rel=0.08), name
    smooth = 0.02 * torch.randn(gaussian.shape, generator=torch.Generator().manual_seed(6))
    q = named(smooth, "int8_channel")
    assert float(code_flips(q, named(smooth + step, "int8_channel"))) == pytest.approx(
        (1e-6 / scale_of(q)).mean().item(), rel=0.05
    )


def test_code_flips_ignore_the_sign_of_zero_and_refuse_other_formats() -> None:
    fmt = format_named("mxfp4")
    plus, minus = torch.zeros(1, 32), -torch.zeros(1, 32)
    plus[0, 0] = minus[0, 0] = 1.0
    assert float(code_flips(quantize(plus, fmt), quantize(minus, fmt))) == 0.0
    minus[0, 1] = 0.5
    assert float(code_flips(quantize(plus, fmt), quantize(minus, fmt))) == pytest.approx(1 / 32)
    with pytest.raises(ValueError, match="cannot compare"):
        float(code_flips(named(plus, "mxfp4"), named(plus, "int4_g32")))


def test_wrong_scales_are_refused() -> None:
    w = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 3\)"):
        quantize(w, format_named("int4_g32"), scale=torch.ones(4, 3))
    with pytest.raises(ValueError, match="needs a zero_point"):
        quantize(w, format_named("int4_g32_asym"), scale=torch.ones(4, 2))
    zero = torch.zeros(4, 2, dtype=torch.int8)
    for name, scale in (("int4_g32_asym", None), ("int4_g32", torch.ones(4, 2))):
        words = f"format {name}: a zero_point goes with the given scale of an asymmetric format"
        with pytest.raises(ValueError, match=words):
            quantize(w, format_named(name), scale=scale, zero_point=zero)
        with pytest.raises(ValueError, match=words):
            fake_quantize(w, format_named(name), scale=scale, zero_point=zero)


def test_merged_weights_share_their_largest_magnitude_where_the_format_has_one_scale() -> None:
    parts = [torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0]], dtype=torch.bfloat16)]
    for name in ("nvfp4", "nvfp4_torchao", "e4m3_tensor"):
        assert torch.equal(merged_amax(parts, format_named(name)), torch.tensor(3.0))  # type: ignore[arg-type]
    for name in ("nvfp4_act_token", "e4m3_block", "int8_channel", "mxfp4", "e4m3_kv", "bf16"):
        assert merged_amax(parts, format_named(name)) is None


def test_lost_trailing_scale_dimension_is_put_back() -> None:
    w = torch.randn(256, 64)
    q = named(w, "e4m3_block")
    assert scale_of(q).shape == (2, 1)
    assert float(code_flips(q, quantize(w, q.fmt, scale=scale_of(q).squeeze(-1)))) == 0.0


def test_input_is_left_alone_and_carries_no_gradient() -> None:
    for name in FORMATS:
        w = torch.randn(16, 64, requires_grad=True)
        before = w.detach().clone()
        assert not fake_quantize(w, format_named(name)).requires_grad, name
        assert not dequantize(quantize(w, format_named(name))).requires_grad, name
        assert torch.equal(w.detach(), before), name


def test_a_scale_that_is_sent_gives_the_codes_back_where_block_scales_are_normal() -> None:
    """NVFP4: below 1/28672 of the largest magnitude a block has a subnormal scale, which its values do not tell."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(8)) + 0.5
    same: dict[float, bool] = {}
    for factor in (1.0, 1e-3, 5e-6):
        small = x.clone()
        small[:, 16:32] *= factor
        q = named(small, "nvfp4")
        again = quantize(dequantize(q), q.fmt, scale=receiver_scale(q))
        block = scale_of(q).float()[:, 1]
        same[factor] = torch.equal(again.codes, q.codes) and torch.equal(scale_of(again), scale_of(q))
        assert bool((block >= 2**-6).all()) == (factor >= 1e-3)
    assert same[1.0] and same[1e-3] and not same[5e-6]


@by_name([fmt for fmt in SCALED if not fmt.double_quant and fmt.rule != "kv"])
def test_a_scale_that_is_sent_gives_the_codes_back_after_bf16_but_for_8_bits_with_a_zero_point(fmt: Format) -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).abs()  # zero points at an end of the range
    q = quantize(w, fmt)
    sent, zero = dequantize(q).to(torch.bfloat16), None if fmt.symmetric else q.zero_point
    again = quantize(sent, fmt, scale=receiver_scale(q), zero_point=zero)
    if fmt.element == "int8" and not fmt.symmetric:
        assert 0.0 < float(code_flips(q, again)) < 0.05
        assert (q.codes.int() - again.codes.int()).abs().max() == 1
    else:
        assert float(code_flips(q, again)) == 0.0
