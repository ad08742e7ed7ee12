"""Muon, an optimizer for the matrices inside a network: momentum, made orthogonal, is the update.

    momentum m <- m + (1 - mu) (g - m) -> Nesterov's u = g + mu (m - g) -> Newton-Schulz: u's singular values go to 1
    -> W <- (1 - lr * decay) W - lr * 0.2 sqrt(max(rows, columns)) u

The factor gives an update the size of AdamW's, so that one learning rate serves both (arXiv:2502.16982, section 2.2).
Rule and coefficients of Newton-Schulz: kellerjordan.github.io/posts/muon. `torch.optim.Muon` computes the same one
matrix at a time, and takes no rate that is a tensor inside a CUDA graph; here matrices of one shape go together, and
nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ROUNDS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of a round of Newton-Schulz: singular values between 0 and 1 go near 1, to 0.7 to 1.2."""
LIKE_ADAMW = 0.2
"""Root mean square of AdamW's updates, in learning rates."""


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [K, R, C], any dtype -> [K, R, C] bfloat16 of the same singular vectors, whose values are near 1."""
    y = x.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        y = y.mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), y, beta=A)
    return y.mT if is_tall else y


class Muon(torch.optim.Optimizer):
    """Muon for matrices; the other parameters need another optimizer. `lr`, a number or a tensor [], is read anew at
    every step."""

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, weight_decay: float) -> None:
        """Raises ValueError for a parameter that is no matrix."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(f"Muon is for matrices, not for a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters that have gradients. `closure` is not called."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, matrices in shapes.items():
                self._update(matrices, group["lr"], group["weight_decay"], LIKE_ADAMW * max(shape) ** 0.5)

    def _update(self, matrices: list[Tensor], lr: float | Tensor, weight_decay: float, factor: float) -> None:
        """Update matrices of one shape."""
        ahead: list[Tensor] = []
        for p in matrices:
            assert p.grad is not None
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - MOMENTUM)
            ahead.append(p.grad.lerp(momentum, MOMENTUM))
        kept, updates = 1 - lr * weight_decay, orthogonal(torch.stack(ahead)).float() * (lr * factor)
        for p, update in zip(matrices, updates, strict=True):
            p.mul_(kept).sub_(update)
