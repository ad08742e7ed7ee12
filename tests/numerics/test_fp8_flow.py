"""The three FP8 products against operands quantized one tile at a time with ml_dtypes, and the published errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from harness.numerics.formats import format_named
from harness.numerics.fp8_flow import FP8Linear, along_tokens, flow_weight
from harness.numerics.linear import EmulatedLinear
from harness.numerics.quantize import dequantize, fake_quantize, quantize
from tests.engines.flow_cases import ACTS, WEIGHTS, randn, relative

BF16 = format_named("bf16")


def linear(n: int, k: int, *, has_bias: bool = False) -> nn.Linear:
    """A layer with weights as large as a trained one's."""
    layer = nn.Linear(k, n, bias=has_bias)
    with torch.no_grad():
        layer.weight.copy_(randn(n, k, name="w", std=0.02))
        if has_bias:
            layer.bias.copy_(randn(n, name="b"))
    return layer


def flow(layer: nn.Linear, is_saved_fp8: bool = True) -> FP8Linear:
    """The layer under test."""
    return FP8Linear(layer, weights=WEIGHTS, acts=ACTS, fp8_saved_activations=is_saved_fp8)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded there and back."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def tiled(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Zero padded, quantized tile by tile under max(amax, 1e-10) / 448, cropped: float32 values."""
    n, k = x.shape
    padded = np.zeros((-(-n // rows) * rows, -(-k // columns) * columns), np.float32)
    padded[:n, :k] = x
    for i in range(0, padded.shape[0], rows):
        for j in range(0, padded.shape[1], columns):
            tile = padded[i : i + rows, j : j + columns]
            scale = np.float32(max(np.abs(tile).max(), np.float32(1e-10))) / np.float32(448)
            codes = np.clip(tile / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            padded[i : i + rows, j : j + columns] = codes.astype(np.float32) * scale
    return padded[:n, :k]


def products(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, is_saved_fp8: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Y, dX, dW) in float64 from the operand table, before any output is rounded."""
    x, w, dy = bf16(x), tiled(bf16(w), 128, 128), bf16(dy)
    xq = tiled(x, 1, 128)
    saved = bf16(xq) if is_saved_fp8 else x
    y = xq.astype(np.float64) @ w.T
    dx = tiled(dy, 1, 128).astype(np.float64) @ w
    return y, dx, tiled(dy.T.copy(), 1, 128).astype(np.float64) @ tiled(saved, 128, 1)


@pytest.mark.parametrize("is_saved_fp8", [True, False])
@pytest.mark.parametrize(("n", "k", "t"), [(256, 384, 200), (130, 70, 129), (24, 16, 5)])
def test_every_product_has_the_operands_of_the_table(n: int, k: int, t: int, is_saved_fp8: bool) -> None:
    layer, x, dy = flow(linear(n, k), is_saved_fp8), randn(t, k, name="x"), randn(t, n, name="dy", std=1e-3)
    x.requires_grad_()
    y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    want = products(x.detach().numpy(), layer.weight.detach().numpy(), dy.numpy(), is_saved_fp8)
    other = products(x.detach().numpy(), layer.weight.detach().numpy(), dy.numpy(), not is_saved_fp8)
    y_want, dx_want, dw_want = (torch.from_numpy(a) for a in want)
    assert relative(y, y_want) < 3e-3 and relative(dx, dx_want) < 3e-3  # bf16 outputs, nothing else
    assert torch.equal(y, y.bfloat16().float()) and torch.equal(dx, dx.bfloat16().float())
    assert relative(dw, dw_want) < 1e-6  # float32
    assert relative(dw, torch.from_numpy(other[2])) > 5e-3


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(200, 384), (3, 7, 384), (2, 70), (1, 1, 16)])
def test_forward_is_the_rollout_layer_bit_for_bit(shape: tuple[int, ...], has_bias: bool) -> None:
    layer, x = linear(96, shape[-1], has_bias=has_bias), randn(*shape, name="x")
    q = quantize(layer.weight.bfloat16(), WEIGHTS)
    bias = layer.bias.bfloat16() if has_bias else None
    engine = EmulatedLinear(dequantize(q), bias, acts=ACTS, base=BF16)
    assert torch.equal(flow(layer)(x).view(torch.int32), engine(x).view(torch.int32))
    assert torch.equal(flow_weight(layer.weight, WEIGHTS), dequantize(q))
    assert not torch.equal(layer(x), engine(x))


def test_published_errors_of_a_gaussian_layer() -> None:
    layer, x, dy = linear(256, 384), randn(200, 384, name="x"), randn(200, 256, name="dy")
    x.requires_grad_()
    exact = (x @ layer.weight.T, dy @ layer.weight, dy.T @ x)
    published = {True: (0.037, 0.037, 0.044), False: (0.037, 0.037, 0.036)}
    cosines = {True: (0.9993, 0.9993, 0.9990), False: (0.9993, 0.9993, 0.99935)}
    for is_saved_fp8, errors in published.items():
        y = flow(layer, is_saved_fp8)(x)
        found = (y, *torch.autograd.grad(y, (x, layer.weight), dy))
        for a, b, error, cosine in zip(found, exact, errors, cosines[is_saved_fp8], strict=True):
            assert relative(a, b) == pytest.approx(error, rel=0.03)
            seen = torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
            assert seen > 0.9988 and seen == pytest.approx(cosine, abs=1e-4)


def test_second_rounding_of_saved_inputs() -> None:
    x = randn(256, 384, name="x").bfloat16().float()
    once = fake_quantize(x, along_tokens(ACTS))
    twice = fake_quantize(fake_quantize(x, ACTS).bfloat16(), along_tokens(ACTS))
    assert relative(once, x) == pytest.approx(0.026, rel=0.03)
    assert relative(twice, x) == pytest.approx(0.036, rel=0.03)


def test_transposed_weights_have_the_same_codes() -> None:
    w = randn(300, 200, name="w").bfloat16()
    q, turned = quantize(w, WEIGHTS), quantize(w.T.contiguous(), WEIGHTS)
    assert q.scale is not None and turned.scale is not None
    assert torch.equal(q.codes.T.float(), turned.codes.float()) and torch.equal(q.scale.T, turned.scale)
    rows = format_named("e4m3_channel")
    assert not torch.equal(fake_quantize(w, rows).T, fake_quantize(w.T.contiguous(), rows))


def test_rows_of_zeros_up_to_the_tile_change_nothing() -> None:
    layer, x, dy = linear(64, 96), randn(200, 96, name="x"), randn(200, 64, name="dy")
    (dw,) = torch.autograd.grad(flow(layer)(x), layer.weight, dy)
    padded, zeros = torch.cat((x, torch.zeros(56, 96))), torch.zeros(56, 64)
    (same,) = torch.autograd.grad(flow(layer)(padded), layer.weight, torch.cat((dy, zeros)))
    torch.testing.assert_close(same, dw, rtol=1e-5, atol=1e-5)
    nothing = torch.autograd.grad(flow(layer)(x), layer.weight, torch.zeros(200, 64))[0]
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_gradients_accumulate_in_float32_and_reach_what_is_trained() -> None:
    layer, x = flow(linear(32, 48, has_bias=True)), randn(10, 48, name="x")
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    first = layer.weight.grad.clone()
    assert not torch.equal(first, first.bfloat16().float())
    assert torch.equal(layer.bias.grad, torch.full((32,), 10.0))
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, 2 * first)
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    assert dx.shape == x.shape and bool(torch.isfinite(dx).all())


def test_parameters_keep_their_names() -> None:
    plain = linear(8, 16, has_bias=True)
    layer = flow(plain)
    assert layer.weight is plain.weight and layer.bias is plain.bias
    assert list(layer.state_dict()) == ["weight", "bias"] and "acts=e4m3_1x128" in repr(layer)
    with pytest.raises(ValueError, match="acts=e4m3_token: its tiles cannot be turned"):
        FP8Linear(plain, weights=WEIGHTS, acts=format_named("e4m3_token"))


@pytest.mark.gpu
def test_gpu_operands_are_the_cpus() -> None:
    plain, x, dy = linear(130, 200, has_bias=True), randn(150, 200, name="x"), randn(150, 130, name="dy")
    x.requires_grad_()
    layer = flow(plain)
    want = (layer(x), *torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy))
    layer, there = layer.cuda(), x.detach().cuda().requires_grad_()
    found = (layer(there), *torch.autograd.grad(layer(there), (there, layer.weight, layer.bias), dy.cuda()))
    for a, b, bound in zip(found, want, (1e-3, 1e-3, 1e-6, 1e-6), strict=True):  # bf16 outputs may tip
        assert relative(a.cpu(), b) < bound
    engine = EmulatedLinear(flow_weight(layer.weight, WEIGHTS), layer.bias.bfloat16(), acts=ACTS, base=BF16).cuda()
    assert torch.equal(engine(there), layer(there))
