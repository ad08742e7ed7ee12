"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): the ranks of a group share every packed row of a pass.

    tokens    a row of N real tokens is padded to a multiple of the group and cut: rank r has the r-th piece
    attention all-to-all: from all heads of own tokens to own heads of all tokens, attention by `Spans`, and back
    outputs   every rank scores the tokens that its piece predicts; log-probs and entropies are gathered on all

Everything else of a layer works on single tokens. verl gives the ranks of a group the same rows, counts them as one
data parallel rank, and FSDP averages gradients over all: the gathered outputs scale theirs by the group's size, since
each rank adds the share of its own tokens. Left out: groups that the heads do not divide by (`checks`), padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from harness.api import Sequences
from harness.models.decoder import Decoder, Spans
from harness.trainers.local.forward import Thrift, lay_out, of_head


class AllToAll(torch.autograd.Function):
    """Exchange between the ranks of a group: dimension `cut` is spread over them, dimension `joined` made whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, cut: int, joined: int) -> Tensor:
        """Cut, send, join."""
        ctx.group, ctx.cut, ctx.joined = group, cut, joined
        sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return torch.cat(got.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The same exchange, the other way."""
        return exchanged(grads[0], ctx.group, ctx.joined, ctx.cut), None, None, None


class Gather(torch.autograd.Function):
    """Join the pieces [n] of all ranks to [N] on each. Every rank then computes the same loss, and its gradient is that
    of its own piece, times the ranks of the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Join the pieces of all ranks."""
        ctx.group, ctx.size = group, len(x)
        whole = x.new_empty(dist.get_world_size(group) * len(x))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of the own piece."""
        first = dist.get_rank(ctx.group) * ctx.size
        return grads[0][first : first + ctx.size] * dist.get_world_size(ctx.group), None


def exchanged(x: Tensor, group: ProcessGroup, cut: int, joined: int) -> Tensor:
    """`AllToAll` applied to x."""
    found = AllToAll.apply(x, group, cut, joined)
    assert isinstance(found, Tensor)
    return found


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """`Gather` applied to x."""
    found = Gather.apply(x, group)
    assert isinstance(found, Tensor)
    return found


@dataclass(frozen=True, kw_only=True)
class SplitSpans(Spans):
    """Sequences of a packed row of which every rank of a group has a piece."""

    group: ProcessGroup

    @classmethod
    def over(cls, lengths: Sequence[int], device: torch.device, group: ProcessGroup) -> SplitSpans:
        """Sequences of these lengths, all at least 1."""
        whole = Spans.of(lengths, device)
        return cls(lengths=whole.lengths, ends=whole.ends, group=group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, n, D], k and v [1, K, n, D] of own tokens -> [1, H, n, D]. H and K divide by the group."""
        q, k, v = (exchanged(x, self.group, 1, 2) for x in (q, k, v))
        return exchanged(super().attend(q, k, v), self.group, 2, 1)


def forward(
    model: Decoder, seqs: Sequences, thrift: Thrift, group: ProcessGroup, *, temperature: float, entropy_grad: bool,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(log-prob [M], entropy [M]) of the M sampled tokens, row by row, float32 nats, on every rank of the group: what
    `harness.trainers.local.forward` says of a packed row on one."""
    layout, ranks = lay_out(seqs, is_shared=False), dist.get_world_size(group)
    count, device = layout.ids.shape[1], layout.ids.device
    padding = -count % ranks
    size = (count + padding) // ranks
    first = dist.get_rank(group) * size
    ids, positions = (
        torch.nn.functional.pad(x, (0, padding))[:, first : first + size] for x in (layout.ids, layout.positions)
    )
    lengths = (*layout.spans.lengths, padding) if padding else layout.spans.lengths
    h = model.hidden(ids, positions, SplitSpans.over(lengths, device, group))[0]
    is_own = (layout.predicts >= first) & (layout.predicts < first + size)
    own = layout.predicts[is_own] - first
    found = of_head(
        model, h[own], seqs.token_ids[seqs.sampled][is_own], thrift, temperature=temperature,
        entropy_grad=entropy_grad, num_tokens=num_tokens,
    )  # fmt: skip
    logp, entropy = (
        gathered(torch.zeros(size, device=device).index_put((own,), values.float()), group)[layout.predicts]
        for values in found
    )
    return logp, entropy
