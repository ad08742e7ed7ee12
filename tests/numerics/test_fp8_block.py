"""What feeds an FP8 product made together with its codes: bit for bit the modules around it, one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.numerics import fp8_block, fp8_gemm
from harness.numerics.formats import format_named
from harness.numerics.fp8_block import gated_block, normed_linear
from harness.numerics.fp8_flow import FP8Linear, use_kernels
from harness.numerics.fp8_gemm import Kernels
from harness.seeds import generator

TOKENS, HIDDEN, INNER, EPS = 200, 256, 384, 1e-6
REFERENCE = fp8_block.reference()


def randn(*shape: int, name: str) -> Tensor:
    """Gaussian bf16 numbers of their own stream."""
    return torch.randn(*shape, generator=generator("cpu", 0, name, *shape)).bfloat16()


def linear(n: int, k: int, kernels: Kernels, *, is_saved_fp8: bool = True) -> FP8Linear:
    """With a weight of its own."""
    layer = nn.Linear(k, n, bias=False)
    with torch.no_grad():
        layer.weight.copy_(randn(n, k, name="w").float() / 16)
    found = FP8Linear(layer, weights=format_named("e4m3_block"), acts=format_named("e4m3_1x128"),
                      fp8_saved_activations=is_saved_fp8)  # fmt: skip
    use_kernels(found, kernels)
    return found


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm as Hugging Face's modules and vLLM's kernel round it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(torch.bfloat16) * gain


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """`y` and the gradients under one of fixed Gaussian numbers."""
    return [y, *torch.autograd.grad(y, inputs, randn(*y.shape, name="dy"))]


def check(found: list[Tensor], want: list[Tensor], gain: int) -> None:
    """All equal but the gradient of the gain, which torch sums in bf16 products."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        if i == gain:
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 5e-3
        else:
            assert torch.equal(a, b), i


def leaves() -> list[Tensor]:
    """x, more and gain, each a leaf."""
    x, more = randn(TOKENS, HIDDEN, name="x"), randn(TOKENS, HIDDEN, name="more")
    return [t.requires_grad_() for t in (x, more, 1 + randn(HIDDEN, name="gain") / 8)]


@pytest.mark.parametrize("is_saved_fp8", [True, False])
@pytest.mark.parametrize("is_square", [False, True])
def test_a_gated_block_is_its_modules(is_square: bool, is_saved_fp8: bool) -> None:
    kernels = fp8_gemm.reference(is_square=is_square)
    up = linear(2 * INNER, HIDDEN, kernels, is_saved_fp8=is_saved_fp8)
    down = linear(HIDDEN, INNER, kernels, is_saved_fp8=is_saved_fp8)
    x, more, gain = leaves()
    h = x + more
    gate, upper = up(norm(h, gain)).chunk(2, -1)
    inputs = [x, more, gain, up.weight, down.weight]
    want = gradients(h + down(F.silu(gate) * upper), inputs)
    flows = up.flow(kernels), down.flow(kernels)
    found = gradients(gated_block(x, more, gain, up.weight, down.weight, flows, REFERENCE, EPS), inputs)
    check(found, want, gain=3)


def test_a_normed_linear_is_its_modules_and_adds_the_residual_gradient() -> None:
    kernels = fp8_gemm.reference()
    layer, (x, _, gain) = linear(INNER, HIDDEN, kernels), leaves()
    inputs = [x, gain, layer.weight]
    want = gradients(torch.cat((layer(norm(x, gain)), x * 2), -1), inputs)
    y, again = normed_linear(x, gain, layer.weight, layer.flow(kernels), REFERENCE, EPS)
    check(gradients(torch.cat((y, again * 2), -1), inputs), want, gain=2)


def test_square_tiles_change_the_weights_gradients_alone() -> None:
    sides: list[list[Tensor]] = []
    for is_square in (False, True):
        kernels = fp8_gemm.reference(is_square=is_square)
        up, down = linear(2 * INNER, HIDDEN, kernels), linear(HIDDEN, INNER, kernels)
        inputs = [*leaves(), up.weight, down.weight]
        flows = up.flow(kernels), down.flow(kernels)
        y = gated_block(inputs[0], inputs[1], inputs[2], up.weight, down.weight, flows, REFERENCE, EPS)
        sides.append(gradients(y, inputs))
    equal = [torch.equal(a, b) for a, b in zip(*sides, strict=True)]
    assert equal == [True] * 4 + [False] * 2
    for runs, square in zip(*(side[4:] for side in sides), strict=True):
        assert 0.02 < float((runs - square).norm() / runs.norm()) < 0.05


def test_what_no_gradient_needs_is_not_quantized() -> None:
    wanted: list[bool] = []

    def gated(both: Tensor, **knobs: bool) -> object:
        wanted.append(knobs["has_columns"])
        return REFERENCE.gated(both, **knobs)  # type: ignore[arg-type]

    fused, kernels = replace(REFERENCE, gated=gated), fp8_gemm.reference()  # type: ignore[arg-type]
    up, down, (x, more, gain) = linear(2 * INNER, HIDDEN, kernels), linear(HIDDEN, INNER, kernels), leaves()

    def block() -> Tensor:
        return gated_block(x, more, gain, up.weight, down.weight, (up.flow(kernels), down.flow(kernels)), fused, EPS)

    with torch.no_grad():
        first = block()
    assert torch.equal(block(), first)
    down.weight.requires_grad_(False)
    dx = torch.autograd.grad(block().float().square().sum(), x)[0]
    assert wanted == [False, True, False] and dx.abs().sum() > 0
