"""GPTQ: round a weight column by column, and let the columns still to come absorb the error of each.

Claim: with H = (2/n) X^T X of calibration inputs, rounding each column and then solving for the rest leaves a far
smaller output error ||X (W - W_hat)^T|| than rounding to nearest, at the same codes and scales. Paper: 2210.17323,
algorithm 1; options as in llm-compressor's `gptq_quantize.py` and AutoGPTQ.

    H^-1 = U^T U,   e_k = (w_k - q_k) / U_kk,   w_j <- w_j - e_k U_kj  for j > k,
    sum_k e_k^2 = delta H delta^T  per row,  delta = W - W_hat  (H with its damping): the identity that proves a run

Scales are those of the original weight, and rounding is that of `quantize.py`. Left out: groups that are filled in the
order of rounding, the order over a network and its calibration data, packing.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from harness.numerics.formats import Format
from harness.numerics.quantize import Quantized, dequantize, has_tensor_scale, quantize

ActOrder = Literal["none", "static"]
ACT_ORDERS: tuple[ActOrder, ...] = get_args(ActOrder)
_DAMPING_FACTORS = (1.0, 10.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class GPTQResult:
    """One weight after GPTQ; columns in their original order whatever the order of rounding was."""

    codes: Tensor
    """[N, K], dtype as in `quantize.Quantized`."""
    scale: Tensor
    """As in `Quantized`."""
    zero_point: Tensor | None
    global_scale: Tensor | None
    """NVFP4's tensor-level scale."""
    values: Tensor
    """float32 [N, K]: what the codes stand for."""
    preround: Tensor
    """float32 [N, K]: the compensated weight that was rounded. With these scales it rounds to `values` bit for bit,
    and unlike them it lies spread inside the bins: the latent weight to train from."""
    errors: Tensor
    """[N, K], dtype of H: e_k of every column."""
    loss: Tensor
    """[N], dtype of H: sum_k e_k^2 / 2 per row, in units of H (half of it where H lacks the factor 2)."""
    damping: float
    """The fraction of the mean diagonal that was added; the last one tried where `is_fallback`."""
    is_fallback: bool
    """H could not be factorised: this is plain rounding to nearest. Count these in a report."""


def accumulate(h: Tensor | None, count: int, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, int]:
    """Take inputs into H = (2/n) sum of x x^T, a running mean: (H [K, K] float32, tokens n so far).

    `x` [..., K], any float dtype; `h`, `count` as last returned (None, 0 to start; a float64 `h` stays float64).
    `keep` [...] bool: False where `x` is padding, which may hold NaN.
    """
    rows = x.detach().reshape(-1, x.shape[-1]) if keep is None else x.detach()[keep]
    rows = rows.to(torch.float32 if h is None else h.dtype)
    if h is None:
        h = rows.new_zeros(rows.shape[1], rows.shape[1])
    total = count + rows.shape[0]
    if total == count:
        return h, count
    return torch.addmm(h, rows.t(), rows, beta=count / total, alpha=2.0 / total), total


def gptq(
    w: Tensor,
    h: Tensor,
    fmt: Format,
    *,
    block: int = 128,
    damping: float = 0.01,
    act_order: ActOrder = "none",
    name: str = "weight",
) -> GPTQResult:
    """GPTQ of `w` [N, K] with the Hessian `h` [K, K] of its inputs, in the dtype of `h` (float32 or float64).

    block: columns between two updates of all the rest; only speed depends on it. damping: fraction of mean(diag H)
    added to the diagonal; ten, then a hundred times that where H does not factorise; then rounding to nearest.
    act_order: "static" rounds columns by falling diagonal, in the groups they had.
    An input that never fired (H_jj = 0) loses its weights.
    Raises ValueError, with `name`: shapes; a group that does not divide K; H zero or not finite; a format or an
    option that is unknown here.
    """
    width = _group_width(w, fmt, name)
    _check(w, h, block, damping, act_order, name)
    w = w.detach().float()
    amax = w.abs().amax() if has_tensor_scale(fmt) else None
    natural = torch.arange(w.shape[1], device=w.device)
    order = natural if act_order == "none" else torch.argsort(h.diagonal(), descending=True, stable=True)
    grid = quantize(w, fmt, tensor_amax=amax)
    # As in llm-compressor, dead inputs come last in the order, and their weights still count for the scales.
    dead = h.diagonal() == 0
    work = w.to(h.dtype).masked_fill(dead, 0.0).t()[order]
    root, damping, is_fallback = _inverse_root((h + dead.to(h.dtype).diag())[order][:, order], damping)
    errors = _sweep(work, root, grid, amax, cast(list[int], (order // width).tolist()), block)
    back = torch.argsort(order)
    preround, errors = work[back].t().float().contiguous(), errors[back].t()
    q = _round(preround, grid, amax)
    assert grid.scale is not None
    return GPTQResult(
        codes=q.codes, scale=grid.scale, zero_point=q.zero_point, global_scale=q.global_scale, values=dequantize(q),
        preround=preround, errors=errors, loss=errors.square().sum(1) / 2, damping=damping, is_fallback=is_fallback,
    )  # fmt: skip


def _round(columns: Tensor, grid: Quantized, amax: Tensor | None) -> Quantized:
    """Columns [N, k] to the scales of `grid`."""
    return quantize(columns, grid.fmt, scale=grid.scale, zero_point=grid.zero_point, tensor_amax=amax)


def _of_group(grid: Quantized, group: int) -> Quantized:
    """The scales of one group's columns, as views."""
    assert grid.scale is not None and grid.fmt.tile is not None
    if grid.fmt.tile[1] == 0:
        return grid
    zero_point = None if grid.zero_point is None else grid.zero_point[..., group : group + 1]
    return replace(grid, scale=grid.scale[..., group : group + 1], zero_point=zero_point)


def _sweep(w: Tensor, root: Tensor, grid: Quantized, amax: Tensor | None, groups: list[int], block: int) -> Tensor:
    """Round all columns of a weight to the scales of `grid` in turn: e_k. What was rounded remains in `w`.

    `w` and the result are [K, N]: columns lie together. `groups`: the group of each.
    """
    errors = torch.zeros_like(w)
    for start in range(0, w.shape[0], block):
        end = min(start + block, w.shape[0])
        for k in range(start, end):
            rounded = dequantize(_round(w[k].unsqueeze(1), _of_group(grid, groups[k]), amax)).squeeze(1)
            torch.sub(w[k], rounded, out=errors[k]).div_(root[k, k])
            w[k + 1 : end].addr_(root[k, k + 1 : end], errors[k], alpha=-1)
        w[end:].addmm_(root[start:end, end:].t(), errors[start:end], alpha=-1)
    return errors


def _inverse_root(h: Tensor, damping: float) -> tuple[Tensor, float, bool]:
    """(U upper triangular with (H + damping * mean(diag H) * I)^-1 = U^T U, the damping it took, False), or
    (I, the last damping tried, True) where no factor can be had."""
    mean, used = h.diagonal().mean(), damping
    for factor in _DAMPING_FACTORS:
        used = damping * factor
        damped = h.clone()
        damped.diagonal().add_(used * mean)
        lower = _cholesky(damped)
        root = None if lower is None else _cholesky(torch.cholesky_inverse(lower))
        if root is not None:
            return root.mT.contiguous(), used, False
    return torch.eye(h.shape[0], dtype=h.dtype, device=h.device), used, True


def _cholesky(h: Tensor) -> Tensor | None:
    """L lower triangular with H = L L^T; None where there is none that is finite."""
    lower, info = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(h))
    return lower if info.item() == 0 and bool(lower.isfinite().all()) else None


def _group_width(w: Tensor, fmt: Format, name: str) -> int:
    """Columns that share a scale."""
    if fmt.tile is None or fmt.element == "nf4" or fmt.rule == "ct_token":
        raise ValueError(f"format {fmt.name}: GPTQ of {name} needs a weight format with scales along the columns")
    width = fmt.tile[1] or w.shape[-1]
    if w.ndim != 2 or w.shape[1] % width:
        raise ValueError(
            f"{name} has shape {tuple(w.shape)}; GPTQ to {fmt.name} needs [N, K] with K a multiple of {width}"
        )
    return width


def _check(w: Tensor, h: Tensor, block: int, damping: float, act_order: str, name: str) -> None:
    if h.shape != (w.shape[1], w.shape[1]) or h.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"Hessian of {name} is {h.dtype} {tuple(h.shape)}; valid: float32 or float64 of {(w.shape[1],) * 2}"
        )
    if not h.isfinite().all() or not w.isfinite().all():
        raise ValueError(f"{name}: its Hessian or the weight itself is not finite; check the calibration inputs")
    if not h.any():
        raise ValueError(f"Hessian of {name} is zero: no calibration token reached it; round it to nearest instead")
    if act_order not in ACT_ORDERS:
        raise ValueError(f"act_order {act_order!r} is unknown; valid: {', '.join(ACT_ORDERS)}")
    if block < 1 or not 0 <= damping < float("inf"):
        raise ValueError(f"block is {block} and damping {damping}; valid: block >= 1, damping >= 0")
