"""Low-rank adapters beside the fused matrices of a rollout engine, unmerged as a serving engine keeps them.

Each fused matrix gets one pair: the A of its parts below each other, and their B as blocks of a diagonal, with
alpha / rank in it. Adapters are held in the engine's base dtype and read the input before activations are quantized.
Left out: several adapters at once, and merging (a correction below half a step would vanish from the codes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.api import TensorRecord
from harness.engines.adapter_shapes import adapter_shapes
from harness.engines.plain_record import plain_record
from harness.numerics.formats import Adapters, Format
from harness.numerics.rounding import CASTS


class LiveAdapters:
    """Owns the adapter tensors of one engine; before the first `load` they are zero."""

    def __init__(
        self,
        adapters: Adapters,
        fused: Mapping[str, tuple[str, ...]],
        shapes: Mapping[str, tuple[int, ...]],
        base: Format,
        device: torch.device,
    ) -> None:
        """`fused`: matrix key -> the checkpoint modules in it, by rows. Raises ValueError for a target that is none."""
        self.wanted = adapter_shapes(adapters, shapes)
        self.adapters, self.shapes, self.base, self.device = adapters, shapes, base, device
        self.fused = {key: modules for key, modules in fused.items() if any(map(self._is_target, modules))}
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for key, modules in self.fused.items():
            rows = [shapes[f"{module}.weight"] for module in modules]
            rank = adapters.rank * sum(map(self._is_target, modules))
            a = torch.zeros(rank, rows[0][1], device=device)
            self.pairs[key] = a, torch.zeros(sum(n for n, _ in rows), rank, device=device)

    def _is_target(self, module: str) -> bool:
        return module.rpartition(".")[2] in self.adapters.targets

    def _places(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(module, its A [r, K], its B [N, r]), views of the pairs."""
        for key, modules in self.fused.items():
            (a, b), column, row = self.pairs[key], 0, 0
            for module in modules:
                count = self.shapes[f"{module}.weight"][0]
                if self._is_target(module):
                    end = column + self.adapters.rank
                    yield module, a[column:end], b[row : row + count, column:end]
                    column = end
                row += count

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over checked tensors; alpha / rank goes into B after its rounding."""
        scale, dtype = self.adapters.alpha / self.adapters.rank, CASTS[self.base.element]
        for module, a, b in self._places():
            a.copy_(tensors[f"{module}.lora_A.weight"].to(dtype))
            b.copy_(tensors[f"{module}.lora_B.weight"].to(dtype)).mul_(scale)

    def records(self) -> Iterator[TensorRecord]:
        """Passport lines, read from the live pairs (B with alpha / rank in it)."""
        for module, a, b in self._places():
            for name, live in (("lora_A", a), ("lora_B", b)):
                yield plain_record(f"{module}.{name}.weight", live.detach().to(CASTS[self.base.element]))
