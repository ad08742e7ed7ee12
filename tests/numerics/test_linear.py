from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.numerics.formats import format_named
from harness.numerics.linear import CastLinear, EmulatedLinear, round_both_ways, ste
from harness.numerics.quantize import dequantize, fake_quantize, quantize


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_without_formats_it_is_the_linear_layer() -> None:
    x, w, b = gaussian(5, 16), gaussian(8, 16, seed=1), gaussian(8, seed=2)
    layer = EmulatedLinear(w, b, acts=None, base=None)
    assert torch.equal(layer(x), nn.functional.linear(x, w, b))
    assert list(layer.parameters()) == []


def test_integer_layer_equals_integer_arithmetic() -> None:
    """int8 x int8 with int32 sums, scales after the sum: what the kernels compute, up to float32 order."""
    x, w = gaussian(7, 64), gaussian(32, 64, seed=1)
    qx, qw = quantize(x, format_named("int8_token")), quantize(w, format_named("int8_channel"))
    assert qx.scale is not None and qw.scale is not None
    exact = qx.codes.int() @ qw.codes.int().T * (qx.scale.double() * qw.scale.double().T)
    layer = EmulatedLinear(dequantize(qw), None, acts=format_named("int8_token"), base=None)
    assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(nn.functional.linear(x, w).double(), exact, rtol=1e-3, atol=1e-3)


def test_base_rounds_what_enters_and_leaves() -> None:
    bf16 = format_named("bf16")
    x, w = gaussian(7, 64), gaussian(32, 64, seed=1)
    y = EmulatedLinear(w, None, acts=None, base=bf16)(x)
    assert torch.equal(y, (x.bfloat16().float() @ w.T).bfloat16().float())
    with_acts = EmulatedLinear(w, None, acts=format_named("e4m3_token"), base=bf16)(x)
    rounded = fake_quantize(x.bfloat16(), format_named("e4m3_token"))
    assert torch.equal(with_acts, (rounded @ w.T).bfloat16().float())
    assert torch.equal(EmulatedLinear(w, None, acts=bf16, base=None)(x), x.bfloat16().float() @ w.T)
    with pytest.raises(ValueError, match="nvfp4 is not a plain cast"):
        EmulatedLinear(w, None, acts=None, base=format_named("nvfp4"))


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Per-token scales do not mix tokens; the tensor-level scale of dynamic NVFP4 does."""
    x = gaussian(6, 64)
    x[0] *= 1000
    for name in ("int8_token", "e4m3_token", "e4m3_1x128", "mxfp8", "nvfp4_act_token"):
        acts = format_named(name)
        assert torch.equal(fake_quantize(x, acts)[1:], fake_quantize(x[1:], acts)), name
    acts = format_named("nvfp4_act")
    assert not torch.equal(fake_quantize(x, acts)[1:], fake_quantize(x[1:], acts))


def test_cast_linear_computes_in_16_bits_and_keeps_its_master() -> None:
    plain = nn.Linear(16, 8)
    master = plain.weight.detach().clone()
    fp16 = format_named("fp16")
    layer = CastLinear(plain, fp16)
    assert layer.weight is plain.weight and layer.bias is plain.bias
    assert list(layer.state_dict()) == ["weight", "bias"]
    x = gaussian(5, 16).requires_grad_()
    y = layer(x)
    half = [t.detach().half().float() for t in (x, layer.weight, layer.bias)]
    assert torch.equal(y, nn.functional.linear(*half).half().float())
    dy = gaussian(5, 8, seed=3)
    y.backward(dy)
    d16 = dy.half().float()
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert torch.equal(x.grad, (d16 @ half[1]).half().float())
    assert torch.equal(layer.weight.grad, (d16.T @ half[0]).half().float())
    assert torch.equal(layer.bias.grad, d16.sum(0).half().float())
    assert torch.equal(layer.weight, master)


def test_cast_linear_overflows_so_that_a_loss_scaler_sees_it() -> None:
    layer = CastLinear(nn.Linear(4, 4, bias=False), format_named("fp16"))
    layer(torch.ones(1, 4)).sum().mul(65536 * 8.0).backward()
    assert layer.weight.grad is not None and layer.weight.grad.isinf().all()
    small = CastLinear(nn.Linear(4, 4, bias=False), format_named("fp16"))
    small(torch.ones(1, 4)).sum().mul(2.0**-26).backward()
    assert small.weight.grad is not None and not small.weight.grad.any()
    kept = CastLinear(nn.Linear(4, 4, bias=False), format_named("bf16"))
    kept(torch.ones(1, 4)).sum().mul(2.0**-26).backward()
    assert kept.weight.grad is not None and kept.weight.grad.all()


def test_fp32_cast_linear_is_the_plain_layer() -> None:
    plain = nn.Linear(16, 8)
    x = gaussian(5, 16)
    assert torch.equal(CastLinear(plain, format_named("fp32"))(x), plain(x))
    assert round_both_ways(x, format_named("fp32")) is x


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "e4m3_block", "bf16", "nf4"])
def test_straight_through_value_and_gradient(name: str) -> None:
    fmt = format_named(name)
    x = gaussian(8, 64).requires_grad_()
    y = ste(x, fmt)
    assert torch.equal(y, fake_quantize(x, fmt)) and not torch.equal(y, x)
    weight = gaussian(8, 64, seed=4)
    (y * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)
