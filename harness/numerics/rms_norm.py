"""RMSNorm with its gradient written out: half the passes over memory of the composed one on a CPU.

    n = x r,  r = (mean(x^2) + eps)^(-1/2),  y = n w
    dx = r (g w - n mean(g w n)),  dw = sum over rows of g n

Root mean square layer normalization, arXiv 1910.07467, eq. 4. Left out: second derivatives.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        n: Tensor = x * r
        ctx.save_for_backward(n, weight, r)
        return n * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        n, weight, r = ctx.saved_tensors
        g = grads[0]
        rows = (g * n).flatten(0, -2)
        mean = torch.mv(rows, weight).div_(n.shape[-1]).view(r.shape)
        return (g * weight).sub_(n * mean).mul_(r), rows.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d] and weight [d], float32 (float64 keeps float64) -> [..., d]; differentiable once in both."""
    assert x.dtype == weight.dtype in (torch.float32, torch.float64), f"rms_norm of {x.dtype} with {weight.dtype}"
    out = _RMSNorm.apply(x, weight, eps)
    assert isinstance(out, Tensor)
    return out


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last axis, by `rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return rms_norm(x, self.weight, self.epsilon)
