"""The written-out gradient against torch's composed one and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from harness.foundation.seeds import generator
from harness.numerics.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 16), (2, 3, 4, 32)])
def test_value_and_gradients_equal_torch(shape: tuple[int, ...]) -> None:
    g = generator("cpu", "rms", *shape)
    x = torch.randn(shape, generator=g, requires_grad=True)
    w = torch.randn(shape[-1:], generator=g, requires_grad=True)
    upstream = torch.randn(shape, generator=g)
    ours, theirs = rms_norm(x, w, 1e-6), F.rms_norm(x, shape[-1:], w, 1e-6)
    assert torch.allclose(ours, theirs, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(ours, (x, w), upstream), torch.autograd.grad(theirs, (x, w), upstream), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_pass_finite_differences_in_float64() -> None:
    g = generator("cpu", "rms", 0)
    x = torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, w))


def test_zero_rows_stay_zero_and_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x, torch.ones(4), 1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("x", "w"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32")])
def test_sixteen_bits_are_refused(x: str, w: str) -> None:
    """Its backward pass would mix them: whoever trains in fewer bits casts around the norm."""
    with pytest.raises(AssertionError, match=f"rms_norm of torch.{x} with torch.{w}"):
        rms_norm(torch.ones(2, 4, dtype=getattr(torch, x)), torch.ones(4, dtype=getattr(torch, w)), 1e-6)
