"""Low-rank factors that make up for what quantization took away: SVD of the residual, CLoQ.

    SVD     B A = SVD_r(W - W_hat), the closest in Frobenius norm
    CLoQ    min ||X (W - W_hat - B A)^T||:  (B A)^T = R^+ SVD_r(R (W - W_hat)^T),  R^T R = X^T X   2501.18475

A layer with adapters computes x W_hat^T + (alpha / r) x A^T B^T. These functions return factors of scale 1: where
alpha / r is another, divide one factor by it. The singular values are shared, A = sqrt(S) V^T and B = U sqrt(S)
(for CLoQ, A is then multiplied by R^+, with R the symmetric root), and the largest entry of every row of V^T is
positive, so that the factors are the same everywhere as long as singular values differ. Computed in float64.
Left out: LQ-LoRA's weighted norm, LoftQ (`harness.fitting.adapter_start`), and fits to more than one layer (RILQ).
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def svd_residual(w: Tensor, w_hat: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-`rank` fit of `w` - `w_hat`, [N, K] of any float dtype -> (A [r, K], B [N, r]) float32.

    Raises ValueError where shapes differ or the rank is not in 1..min(N, K).
    """
    _check(w, w_hat, rank)
    a, b = _factors(w.detach().double() - w_hat.detach().double(), rank)
    return a.float(), b.float()


def cloq(w: Tensor, w_hat: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The rank-`rank` fit of `w` - `w_hat` [N, K] that leaves the least output error -> (A [r, K], B [N, r]) float32.

    `gram` [K, K] float32 or float64: X^T X of the layer's inputs times any positive number (`gptq.accumulate`).
    Directions that no input has (eigenvalues below K eps of the largest, ours) get no correction.
    Raises ValueError as `svd_residual`, and where the Gram matrix is of another size, not finite, or zero.
    """
    _check(w, w_hat, rank)
    if gram.shape != (w.shape[1], w.shape[1]):
        raise ValueError(f"gram has shape {tuple(gram.shape)}; a weight {tuple(w.shape)} needs {(w.shape[1],) * 2}")
    if not gram.isfinite().all() or not gram.any():
        raise ValueError("gram is zero or not finite; check the calibration inputs")
    # In units of the mean eigenvalue, so that the scale of the Gram matrix does not move the balance of A and B.
    gram_unit = gram.detach().double() / gram.detach().double().diagonal().mean()
    values, vectors = cast(tuple[Tensor, Tensor], torch.linalg.eigh(gram_unit))
    is_seen = values > values[-1].clamp(min=0.0) * gram.shape[0] * torch.finfo(gram.dtype).eps
    root = torch.where(is_seen, values, 0.0).sqrt()
    inverse = torch.where(is_seen, 1.0 / root, 0.0)
    residual = w.detach().double() - w_hat.detach().double()
    a, b = _factors(residual @ (vectors * root) @ vectors.t(), rank)
    return (a @ (vectors * inverse) @ vectors.t()).float(), b.float()


def _factors(residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """float64 [N, K] -> its best (A [r, K], B [N, r])."""
    svd = cast(tuple[Tensor, Tensor, Tensor], torch.linalg.svd(residual, full_matrices=False))
    u, root, vh = svd[0][:, :rank], svd[1][:rank].sqrt(), svd[2][:rank]
    largest = vh.gather(1, vh.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(vh.dtype)
    return vh * sign * root.unsqueeze(1), u * sign.t() * root


def _check(w: Tensor, w_hat: Tensor, rank: int) -> None:
    if w.ndim != 2 or w.shape != w_hat.shape:
        raise ValueError(f"weight {tuple(w.shape)} and quantized weight {tuple(w_hat.shape)} must be one [N, K]")
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"rank is {rank}; a weight {tuple(w.shape)} takes 1 to {min(w.shape)}")
