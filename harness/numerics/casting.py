"""16-bit training of a whole model in float32 arithmetic: every parameter, linear input and linear output rounded.

`linear.CastLinear` does the linear layers; here are the parameters that no matmul reads (embeddings, norm gains), and
the function that turns a model around. Left out: activations between layers, which stay float32 at both sites.
"""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from harness.numerics.formats import Format
from harness.numerics.linear import CastLinear, round_both_ways


class CastEmbedding(nn.Embedding):
    """An embedding whose weight is rounded when read, and its gradient when written."""

    def __init__(self, embedding: nn.Embedding, fmt: Format) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight
        self.fmt = fmt

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [...] int64 -> float32 [..., d]."""
        return F.embedding(input, round_both_ways(self.weight, self.fmt))


class CastNorm(nn.RMSNorm):
    """An RMSNorm whose gain is rounded; the normalisation itself stays float32, as engines compute it."""

    def __init__(self, norm: nn.RMSNorm, fmt: Format) -> None:
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight
        self.fmt = fmt

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> float32 [..., d]."""
        return F.rms_norm(x, self.normalized_shape, round_both_ways(self.weight, self.fmt), self.eps)


Module = TypeVar("Module", bound=nn.Module)
CASTS = {nn.Linear: CastLinear, nn.Embedding: CastEmbedding, nn.RMSNorm: CastNorm}


def cast_model(model: Module, fmt: Format) -> Module:
    """Replace, in place, every linear layer, embedding and RMSNorm by its rounding twin; parameters and names stay."""
    for name, module in list(model.named_modules()):
        if type(module) in CASTS:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, CASTS[type(module)](module, fmt))
    return model
