"""Attention over a rounded cache, in place of a decoder's own softmax attention, with counts of what rounding does.

One full pass over a text equals token by token sampling with a cache: every position reads the same rounded keys and
values, in the prompt too. Axes: B rows, H heads, K key-value heads, T queries, L positions, D head dim.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.models.decoder import Decoder, Spans
from harness.numerics.formats import format_named
from harness.numerics.kv_scales import KV, Role, quantize_kv
from harness.numerics.rounding import FLOAT_MAX

FORMAT = format_named("e4m3_kv")
LARGEST = FLOAT_MAX[FORMAT.element]
SUBNORMAL = 2.0**-6
"""Smallest normal number of E4M3: below it the steps are 2^-9 whatever the size."""
FLUSHED = 2.0**-10
"""Half of E4M3's smallest number: what is not larger is stored as 0."""
PROBABILITY_FACTOR = 256.0
"""FlashAttention 3 stores softmax weights in FP8 as exp(score - largest) times 2^8 (its `Max_offset` of 8)."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Rounded roles with their scales."""

    scales: Mapping[Role, Tensor]
    """Role -> float32 [layers, heads] or, for all heads of a layer, [layers, 1]. A role that is missing stays exact."""
    rounds_probabilities: bool = False
    """The softmax weights are rounded to FP8 too, as FP8 attention does; their sum is not."""


class Counts:
    """Numbers of stored values by role, over layers and real positions.

    saturated: beyond the largest code. subnormal: below the smallest normal code and not 0, those that become 0 among
    them. flushed: stored as 0 without being 0.
    """

    def __init__(self, real: Tensor | None = None) -> None:
        """`real` [B, L] bool: positions of the batch at hand that hold a token; None: all."""
        self.real = real
        self.found: dict[Role, Counter[str]] = defaultdict(Counter)

    def add(self, role: Role, x: Tensor) -> None:
        """Count x [B, K, L, D], already divided by the scale."""
        size = x.abs() if self.real is None else x.abs().transpose(1, 2)[self.real]
        self.found[role].update(
            total=size.numel(),
            saturated=int((size > LARGEST).sum()),
            subnormal=int(((size < SUBNORMAL) & (size > 0)).sum()),
            flushed=int(((size <= FLUSHED) & (size > 0)).sum()),
        )

    def shares(self) -> dict[str, dict[str, float]]:
        """Role -> share of the stored values that are saturated, subnormal, flushed."""
        return {
            role: {name: own[name] / own["total"] for name in ("saturated", "subnormal", "flushed")}
            for role, own in self.found.items()
        }


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x [B, heads, L, D] as FP8 gives it back under scales [heads] or [1], float32."""
    wide = scale[:, None, None]
    return quantize_kv(x / wide, FORMAT, torch.ones((), device=x.device)) * wide


class CachedAttention(nn.Module):
    """The attention core of one layer, reading keys and values as the cache gives them back."""

    def __init__(self, cache: Cache, layer: int, counts: Counts) -> None:
        super().__init__()
        self.cache, self.layer, self.counts = cache, layer, counts

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | Spans | None) -> Tensor:
        """As `CoreAttention.forward`: q [B, H, T, D], k and v [B, K, L, D], a mask or None for causal -> [B, H, T, D].
        Raises ValueError for packed rows."""
        if isinstance(at, Spans):
            raise ValueError("packed rows: the rounded cache takes rows of one sequence")
        given: dict[Role, Tensor] = {"q": q, "k": k, "v": v}
        for role, scales in self.cache.scales.items():
            scale = scales[self.layer]
            if role in KV:
                self.counts.add(role, given[role] / scale[:, None, None])
            given[role] = rounded(given[role], scale)
        q, k, v = given["q"], given["k"], given["v"]
        if not self.cache.rounds_probabilities:
            return F.scaled_dot_product_attention(q, k, v, at, is_causal=at is None, enable_gqa=q.shape[1] > k.shape[1])
        p = scores(q, k, at)
        p = p.sub_(p.amax(-1, keepdim=True)).exp_()
        low = quantize_kv(p * PROBABILITY_FACTOR, FORMAT, torch.ones((), device=p.device)) / PROBABILITY_FACTOR
        return low @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) / p.sum(-1, keepdim=True)


def scores(q: Tensor, k: Tensor, at: Tensor | None) -> Tensor:
    """Scores [B, H, T, L] before the softmax, -inf where a query sees nothing. `at` as in `CoreAttention.forward`."""
    raw = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if at is None:
        at = torch.ones(raw.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return raw.masked_fill_(~at, float("-inf"))


@contextmanager
def through(model: Decoder, cache: Cache) -> Iterator[Counts]:
    """While the block runs, every layer of the decoder attends over the rounded cache; what it stores is counted."""
    counts, layers = Counts(), list[Any](layer.self_attn for layer in model.model.layers)
    cores = [attention.core for attention in layers]
    try:
        for number, attention in enumerate(layers):
            attention.core = CachedAttention(cache, number, counts)
        yield counts
    finally:
        for attention, core in zip(layers, cores, strict=True):
            attention.core = core
