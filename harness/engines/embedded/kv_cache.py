"""An in-place key-value cache for a batch of rows of equal length, kept in float32.

The memory is reserved once for the final length, but laid out with little more than the slots in use: batched matrix
products over nearly contiguous rows are up to twice as fast on a CPU as over the first slots of long ones. Now and
then everything moves to a longer layout (`ensure`), and rows that have ended are dropped the same way (`keep`). A
quantized format is emulated: what is stored is rounded under one scale per layer for K and for V, and read back as
float32.
Axes: R rows, K key-value heads, S slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.api import KVProtocol
from harness.numerics.formats import Format
from harness.numerics.kv_scales import inference_scale, kv_scale, quantize_kv


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

    def settle(self, protocol: KVProtocol = "trainer") -> None:
        """Turn what was recorded since `observe` into scales (`kv_scales.kv_scale`, or vLLM's `inference_scale`)."""
        assert self.amax is not None and self.fmt is not None
        if protocol == "inference":
            k, v = self.amax.unbind(1)
            self.scales = torch.stack((inference_scale(k, self.fmt, "k"), inference_scale(v, self.fmt, "v")), 1)
        else:
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
    """Buffers [layers] of [R * K, S, D] float32, reused from one batch to the next where they are large enough."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self.num_layers, self.heads, self.head_dim, self.device = num_layers, num_kv_heads, head_dim, device
        self.rows = self.slots = self.max_slots = 0
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self._storage: list[Tensor] = []
        self._spare = torch.empty(0)

    def reserve(self, rows: int, length: int, max_slots: int) -> None:
        """Make room for `rows` that hold `length` slots now and at most `max_slots`; what was stored is lost."""
        size = rows * self.heads * max_slots * self.head_dim
        if not self._storage or self._storage[0].numel() < size:
            self._storage = [torch.empty(size, device=self.device) for _ in range(2 * self.num_layers)]
            self._spare = torch.empty(size, device=self.device)
        self.max_slots = max_slots
        self._lay_out(rows, self._roomy(length))

    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(buffer.nbytes for buffer in (*self._storage, self._spare))

    def _roomy(self, length: int) -> int:
        return min(self.max_slots, length + max(8, length // 4))

    def _lay_out(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        views = [self._view(buffer).flatten(0, 1) for buffer in self._storage]
        self.k, self.v = views[: self.num_layers], views[self.num_layers :]

    def _view(self, buffer: Tensor) -> Tensor:
        shape = (self.rows, self.heads, self.slots, self.head_dim)
        return buffer[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)

    def fill(self, layer: int, k: Tensor, v: Tensor, rows: slice, index: Tensor | None) -> None:
        """Store prompts [P, K, L, D] in `rows`; the r-th of them takes prompt `index[r]` (None: one prompt per row)."""
        for buffer, x in ((self.k[layer], k), (self.v[layer], v)):
            x = x if index is None else x.index_select(0, index)
            self._view(buffer.flatten())[rows, :, : x.shape[2]].copy_(x)

    def append(self, layer: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Store one position [R, K, D] of every row at `slot`."""
        shape = (self.rows, self.heads, self.head_dim)
        self.k[layer].select(1, slot).view(shape).copy_(k)
        self.v[layer].select(1, slot).view(shape).copy_(v)

    def ensure(self, slot: int) -> None:
        """Make room for `slot`, where the slots before it are in use."""
        if slot >= self.slots:
            self._move(self.rows, self._roomy(slot), lambda old: old[:, :, :slot])

    def keep(self, rows: Tensor, length: int) -> None:
        """Keep only `rows` [n] int64, ascending; the first `length` slots of each."""
        self._move(len(rows), self.slots, lambda old: old[:, :, :length].index_select(0, rows))

    def _move(self, rows: int, slots: int, kept: Callable[[Tensor], Tensor]) -> None:
        """Copy the part `kept` [rows, K, length, D] of every buffer into another layout."""
        found: list[Tensor] = []
        old_shape, new_shape = (self.rows, self.slots), (rows, slots)
        for buffer in self._storage:
            self.rows, self.slots = old_shape
            x = kept(self._view(buffer))
            self.rows, self.slots = new_shape
            self._view(self._spare)[:, :, : x.shape[2]].copy_(x)
            found.append(self._spare)
            self._spare = buffer
        self._storage = found
        self._lay_out(rows, slots)
