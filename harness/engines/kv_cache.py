"""A static, in-place key-value cache for a batch of rows of equal length, kept in float32.

Rows that have finished are dropped by copying the others together (`keep`). A quantized cache format is emulated:
what is stored is rounded under one scale per layer for K and for V, and read back as float32.
Axes: R rows, K key-value heads, S slots, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.formats import Format
from harness.numerics.kv_scales import kv_scale, quantize_kv


class KVScales:
    """The format of the cache and its scales, one pair per layer: 1.0 until calibrated."""

    def __init__(self, fmt: Format | None, num_layers: int, device: torch.device) -> None:
        self.fmt = fmt
        self.scales = torch.ones(num_layers, 2, device=device)
        self.amax: Tensor | None = None
        """[layers, 2] float32 largest magnitudes seen, while observing; storing is exact then."""

    def observe(self) -> None:
        """Start recording magnitudes in place of quantizing."""
        self.amax = torch.zeros_like(self.scales)

    def settle(self) -> None:
        """Turn what was recorded since `observe` into scales (margin and floor: `kv_scales.kv_scale`)."""
        assert self.amax is not None and self.fmt is not None
        self.scales = kv_scale(self.amax, self.fmt)
        self.amax = None

    def stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as the cache gives them back, any shape, float32."""
        if self.amax is not None:
            self.amax[layer] = torch.maximum(self.amax[layer], torch.stack((k.abs().amax(), v.abs().amax())))
            return k, v
        if self.fmt is None:
            return k, v
        return quantize_kv(k, self.fmt, self.scales[layer, 0]), quantize_kv(v, self.fmt, self.scales[layer, 1])


class KVCache:
    """Buffers [layers][2] of [R * K, S, D] float32, reused from one batch to the next where they are large enough."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self.num_layers, self.heads, self.head_dim, self.device = num_layers, num_kv_heads, head_dim, device
        self.rows = self.slots = 0
        self._storage: list[Tensor] = []
        self._spare = torch.empty(0)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` x `slots`; what was stored is lost."""
        size = rows * self.heads * slots * self.head_dim
        if not self._storage or self._storage[0].numel() < size:
            self._storage = [torch.empty(size, device=self.device) for _ in range(2 * self.num_layers)]
            self._spare = torch.empty(size, device=self.device)
        self.rows, self.slots = rows, slots
        self._view()

    def _view(self) -> None:
        shape = (self.rows * self.heads, self.slots, self.head_dim)
        size = shape[0] * shape[1] * shape[2]
        views = [buffer[:size].view(shape) for buffer in self._storage]
        self.k, self.v = views[: self.num_layers], views[self.num_layers :]

    def fill(self, layer: int, k: Tensor, v: Tensor, index: Tensor | None) -> None:
        """Store prompts [P, K, L, D]; row r takes prompt `index[r]` (None: one prompt per row)."""
        for buffer, x in ((self.k[layer], k), (self.v[layer], v)):
            x = x if index is None else x.index_select(0, index)
            buffer.view(self.rows, self.heads, self.slots, self.head_dim)[:, :, : x.shape[2]].copy_(x)

    def append(self, layer: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Store one position [R, K, D] of every row at `slot`."""
        shape = (self.rows, self.heads, self.head_dim)
        self.k[layer].select(1, slot).view(shape).copy_(k)
        self.v[layer].select(1, slot).view(shape).copy_(v)

    def keep(self, rows: Tensor, length: int) -> None:
        """Keep only `rows` [n] int64, ascending; the first `length` slots of each."""
        n = len(rows)
        for i, buffer in enumerate(self._storage):
            old = buffer[: self.rows * self.heads * self.slots * self.head_dim]
            old = old.view(self.rows, self.heads, self.slots, self.head_dim)[:, :, :length]
            new = self._spare[: n * self.heads * self.slots * self.head_dim]
            torch.index_select(old, 0, rows, out=new.view(n, self.heads, self.slots, self.head_dim)[:, :, :length])
            self._storage[i], self._spare = self._spare, buffer
        self.rows = n
        self._view()
