"""What the FP8 flow fuses, its own product and its variant of square tiles, on FP8 tensor cores."""

from __future__ import annotations

import pytest
import torch

from harness.numerics import fp8_gemm
from harness.numerics.fp8_block import gated_block
from harness.numerics.fp8_flow import use_kernels
from tests.engines import flow_cases
from tests.engines.flow_cases import ACTS
from tests.gpu.test_fp8_flow import CUDA, SHAPES, SIDE, linear, named, product, randn, relative

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    """Triton comes with a CUDA build of torch."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")


def test_what_feeds_a_product_is_quantized_as_torch_makes_it() -> None:
    """exp, rsqrt and sums of a GPU may differ from the CPU's in their last bits, which tips a code now and then."""
    found = flow_cases.fused_mismatches(CUDA)
    assert len(found) == 8 and {name: wrong for name, wrong in found.items() if wrong > 500} == {}


@pytest.mark.parametrize("name", ["triton", "triton, narrow", "triton, alone"])
def test_the_own_product_of_runs(name: str) -> None:
    kernels = named(name)
    for m, n, k in SHAPES:
        _, a = kernels.runs(randn(k, m, name="a"), ACTS, has_rows=False, has_columns=True, is_twice=False)
        _, b = kernels.runs(randn(k, n, name="b"), ACTS, has_rows=False, has_columns=True, is_twice=False)
        assert a is not None and b is not None
        assert relative(kernels.by_runs(a, b), product(a, b)) < 2e-3
        assert torch.equal(kernels.by_runs(a, b), kernels.by_runs(a, b))
    assert flow_cases.product_mismatches(CUDA) == {"product": 0, "product, added": 0}


@pytest.mark.parametrize("name", ["square, scaled_mm", "square, deep_gemm"])
def test_wgrad_of_square_tiles(name: str) -> None:
    kernels, reference = named(name), fp8_gemm.reference()
    x, dy = randn(640, SIDE, name="x"), randn(640, SIDE, name="dy")
    knobs = {"has_rows": False, "has_columns": True}
    _, a = kernels.runs(dy, ACTS, is_twice=False, **knobs)
    _, b = kernels.runs(x, ACTS, is_twice=True, is_square=True, **knobs)
    _, want = reference.runs(x.cpu(), ACTS, is_twice=True, is_square=True, **knobs)
    assert a is not None and b is not None and want is not None and kernels.is_square
    assert torch.equal(b.codes.cpu().view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(b.scale.cpu(), want.scale)
    dw = kernels.by_runs(a, b)
    assert dw.dtype == torch.float32 and relative(dw, product(a, b)) < 3e-3


def test_a_fused_block_is_its_modules() -> None:
    """Norm, gate and residual sums in one go, against bf16 modules around layers of the same kernels."""
    from harness.engines.vllm import flow_kernels

    kernels, fused = named("mixed"), flow_kernels.fused()
    up, down = linear(2 * SIDE, SIDE), linear(SIDE, SIDE)
    for layer in (up, down):
        use_kernels(layer, kernels)
    x, more, gain = (randn(*size, name=name).bfloat16().requires_grad_()
                     for size, name in (((200, SIDE), "x"), ((200, SIDE), "more"), ((SIDE,), "gain")))  # fmt: skip
    h = x + more
    wide = h.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * gain
    gate, upper = up(normed).chunk(2, -1)
    want = h + down(torch.nn.functional.silu(gate) * upper)
    flows = up.flow(kernels), down.flow(kernels)
    found = gated_block(x, more, gain, up.weight, down.weight, flows, fused, 1e-6)
    assert relative(found, want) < 2e-3
    inputs, dy = [x, more, gain, up.weight, down.weight], randn(200, SIDE, name="dy").bfloat16()
    grads = (torch.autograd.grad(y, inputs, dy) for y in (found, want))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype and relative(a, b) < 8e-3
