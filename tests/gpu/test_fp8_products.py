"""The FP8 flow's own product of runs and its variant of square tiles, on FP8 tensor cores."""

from __future__ import annotations

import pytest
import torch

from harness.numerics import fp8_gemm
from tests.engines import flow_cases
from tests.engines.flow_cases import ACTS
from tests.gpu.test_fp8_flow import CUDA, SHAPES, SIDE, named, product, randn, relative

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    """Triton comes with a CUDA build of torch."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")


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


def test_wgrad_of_square_tiles() -> None:
    kernels, reference = named("square"), fp8_gemm.reference()
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
