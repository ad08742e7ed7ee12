"""Bytes of tensors alive at once: what an allocator would show on a device that has no statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors made under it that are still referenced, and their highest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.held:
                    self.held[key] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, key, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def peak(work: Callable[[], object]) -> int:
    """Most bytes at once of what `work` makes, gradients included; what was there before does not count."""
    with Alive() as alive:
        work()
    return alive.peak
