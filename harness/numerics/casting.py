"""16-bit training of a whole model in float32 arithmetic: every parameter, linear input and linear output rounded.

`linear.CastLinear` does the linear layers; here are the parameters that no matmul reads (embeddings, norm gains), and
the function that turns a model around. Left out: activations between layers, which stay float32 at both sites.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from harness.numerics.formats import Format
from harness.numerics.linear import CastLinear, round_both_ways
from harness.numerics.rms_norm import RMSNorm, rms_norm


class CastEmbedding(nn.Embedding):
    """An embedding whose weight is rounded when read, and its gradient when written."""

    def __init__(self, embedding: nn.Embedding, fmt: Format) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight
        self.fmt = fmt

    def forward(self, input: Tensor) -> Tensor:
        """Token ids [...] int64 -> float32 [..., d]."""
        return F.embedding(input, round_both_ways(self.weight, self.fmt))


class CastNorm(RMSNorm):
    """An RMSNorm whose gain is rounded; the normalisation itself stays float32, as engines compute it."""

    def __init__(self, norm: RMSNorm, fmt: Format) -> None:
        super().__init__(norm.normalized_shape[0], norm.epsilon)
        self.weight = norm.weight
        self.fmt = fmt

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> float32 [..., d]."""
        return rms_norm(x, round_both_ways(self.weight, self.fmt), self.epsilon)


Module = TypeVar("Module", bound=nn.Module)


def _twin(module: nn.Module, fmt: Format) -> nn.Module | None:
    """The rounding twin of a module that holds parameters of its own; None for a container."""
    if type(module) is nn.Linear:
        return CastLinear(module, fmt)
    if type(module) is nn.Embedding:
        return CastEmbedding(module, fmt)
    return CastNorm(module, fmt) if type(module) is RMSNorm else None


def cast_model(model: Module, fmt: Format, *, leave: tuple[str, ...] = ()) -> Module:
    """Replace, in place, every linear layer, embedding and RMSNorm by its rounding twin; parameters and names stay.

    Modules called as in `leave` (such as "lm_head") are not touched.
    """
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    for name, module in modules:
        twin = None if name in leave else _twin(module, fmt)
        if twin is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, twin)
    return model
