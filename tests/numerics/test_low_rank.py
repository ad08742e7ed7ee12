"""Low-rank compensation: optimality against numpy, CLoQ against plain SVD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.gptq import accumulate
from harness.numerics.low_rank import cloq, svd_residual
from harness.numerics.quantize import fake_quantize

FORMAT = format_named("int3_g32")


def weight(rows: int = 40, columns: int = 64) -> Tensor:
    return 0.05 * torch.randn(rows, columns, generator=generator("cpu", 4, "low_rank", rows, columns))


def quantizer(w: Tensor) -> Tensor:
    return fake_quantize(w, FORMAT)


def gram(columns: int = 64) -> Tensor:
    draw = generator("cpu", 4, "gram", columns)
    x = torch.randn(200, columns, generator=draw) * torch.randn(columns, generator=draw).exp()
    return accumulate(None, 0, x)[0]


def output_error(delta: Tensor, h: Tensor) -> float:
    return float((delta.double() @ h.double() * delta.double()).sum())


@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 32), (32, 32)])
def test_svd_residual_is_the_best_fit(rows: int, columns: int) -> None:
    w = weight(rows, columns)
    w_hat, rank = quantizer(w), 6
    a, b = svd_residual(w, w_hat, rank)
    assert a.shape == (rank, columns) and b.shape == (rows, rank) and a.dtype == b.dtype == torch.float32
    u, s, vh = np.linalg.svd((w.double() - w_hat.double()).numpy(), full_matrices=False)
    best = torch.from_numpy((u[:, :rank] * s[:rank]) @ vh[:rank])
    assert torch.allclose((b @ a).double(), best, atol=1e-8)
    left = (w - w_hat - b @ a).double().norm().item()
    assert left == pytest.approx(float(np.sqrt((s[rank:] ** 2).sum())), rel=1e-5)


def test_factors_share_the_singular_values_and_have_one_sign() -> None:
    w = weight()
    a, b = svd_residual(w, quantizer(w), 8)
    s = torch.linalg.svdvals(w - quantizer(w))[:8]
    assert torch.allclose(a @ a.T, s.diag(), atol=1e-6) and torch.allclose(b.T @ b, s.diag(), atol=1e-6)
    assert (a.gather(1, a.abs().argmax(1, keepdim=True)) > 0).all()


def test_full_rank_restores_the_weight() -> None:
    w = weight()
    for a, b in (svd_residual(w, quantizer(w), 40), cloq(w, quantizer(w), gram(), 40)):
        assert torch.allclose(quantizer(w) + b @ a, w, atol=1e-6)
    exact = svd_residual(w, w, 4)
    assert not exact[0].any() and not exact[1].any()


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_cloq_leaves_less_output_error_than_svd(rank: int) -> None:
    w, h = weight(), gram()
    delta = w - quantizer(w)
    a, b = svd_residual(w, quantizer(w), rank)
    c, d = cloq(w, quantizer(w), h, rank)
    assert output_error(delta - d @ c, h) < 0.9 * output_error(delta - b @ a, h)
    assert (delta - d @ c).norm() > (delta - b @ a).norm()
    # No fit of this rank is better: the weighted residual keeps only what its largest singular values leave.
    root = torch.linalg.cholesky(h.double())
    s = torch.linalg.svdvals(delta.double() @ root)
    assert output_error(delta - d @ c, h) == pytest.approx(s[rank:].square().sum().item(), rel=1e-4)


def test_cloq_of_white_inputs_is_svd() -> None:
    w = weight()
    (a, b), (c, d) = svd_residual(w, quantizer(w), 6), cloq(w, quantizer(w), 3.0 * torch.eye(64), 6)
    assert torch.allclose(a, c, atol=1e-6) and torch.allclose(b @ a, d @ c, atol=1e-7)
    # The size of the Gram matrix does not matter.
    small, large = (cloq(w, quantizer(w), gram() * factor, 6) for factor in (1.0, 1e6))
    assert torch.allclose(small[0], large[0], atol=1e-5) and torch.allclose(small[1], large[1], atol=1e-5)


def test_cloq_corrects_nothing_where_no_input_goes() -> None:
    w, x = weight(), torch.randn(30, 64, generator=generator("cpu", 4, "few"))
    x[:, 10] = 0.0
    h, _ = accumulate(None, 0, x)
    a, b = cloq(w, quantizer(w), h, 8)
    assert a.isfinite().all() and a[:, 10].abs().max() < 1e-6 < a.abs().max()
    c, d = svd_residual(w, quantizer(w), 8)
    assert output_error(w - quantizer(w) - b @ a, h) < output_error(w - quantizer(w) - d @ c, h)


def test_bad_input() -> None:
    w = weight()
    with pytest.raises(ValueError, match=r"rank is 41; a weight \(40, 64\) takes 1 to 40"):
        svd_residual(w, w, 41)
    with pytest.raises(ValueError, match=r"\(40, 64\) and quantized weight \(64, 40\)"):
        svd_residual(w, w.T, 4)
    with pytest.raises(ValueError, match=r"gram has shape \(40, 40\); .*\(64, 64\)"):
        cloq(w, w, torch.eye(40), 4)
    for bad in (torch.zeros(64, 64), torch.eye(64) * torch.nan):
        with pytest.raises(ValueError, match="gram is zero or not finite"):
            cloq(w, w, bad, 4)
