"""Routing of tokens to experts, and the sum over the chosen ones: a sparse mixture as Qwen3-MoE has it.

    s = x W_r^T,   I = the k largest s, or the experts given,   g_i = softmax(s)_i, divided by their sum over I
    y = sum over i in I of g_i f_i(x)

Routing and gates are float32 whatever the logits were rounded to. Given experts keep the gradient of the gates, so that
the router learns (R3, arXiv 2510.11370). Left out: capacity limits, shared experts, a balancing loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

OWN = -1
"""Expert id of a position without given experts: it uses the router's own."""


def route(logits: Tensor, count: int, *, is_normed: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expert ids [N, k] int64, gates [N, k] float32 with the gradient of the logits) from router logits [N, E].

    `is_normed`: the k gates of a token add up to 1. `given` [N, k] integers replaces the `count` = k largest, row by
    row, where it is not `OWN`.
    """
    scores = logits.to(torch.float32)
    ids = scores.detach().topk(count, -1).indices
    if given is not None:
        given = given.to(torch.int64)
        ids = torch.where(given == OWN, ids, given)
    if is_normed:  # the softmax over all, divided by the share of the chosen, without its underflow
        return ids, torch.softmax(scores.gather(-1, ids), -1)
    return ids, torch.softmax(scores, -1).gather(-1, ids)


def mix(x: Tensor, ids: Tensor, gates: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Sum over a token's experts of gate times `expert(number, rows)`: x [N, d], ids and gates [N, k] -> [N, d] of the
    dtype of x.

    Experts are called in ascending order, those without a token not at all; each adds to a token at most once.
    """
    order = ids.flatten().argsort(stable=True)
    counted = torch.bincount(ids.flatten(), minlength=num_experts)
    counts = cast("list[int]", counted.tolist())  # pyright: ignore[reportUnknownMemberType]
    token, gate = order // ids.shape[1], gates.flatten()[order][:, None]
    out, first = torch.zeros_like(x), 0
    for number, rows in enumerate(counts):
        if rows:
            own = slice(first, first + rows)
            out.index_add_(0, token[own], (expert(number, x[token[own]]) * gate[own]).to(x.dtype))
            first += rows
    return out


def entering(model: nn.Module, name: str, mask: Tensor) -> Tensor:
    """Part of `mask` [B, L] bool that stands for the rows entering module `name` in the last forward pass: all of
    it, or for a module of an expert those of the expert's tokens, flat."""
    mixture, is_inside, rest = name.partition(".experts.")
    if not is_inside:
        return mask
    chosen = cast(Tensor, model.get_submodule(mixture).chosen)
    return mask.flatten()[(chosen == int(rest.partition(".")[0])).any(-1).flatten()]
