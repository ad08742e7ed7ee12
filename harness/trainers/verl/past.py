"""Earlier versions of a rank's weights, for stale rollouts under verl (`algo.staleness`, `harness.trainers.staleness`).

    push of step t   keep this rank's shards of version t on the CPU; send version max(0, t - k)
    every fifth t    score the batch with the version that sampled it: the module holds it for a pass
    checkpoint       versions t - k to t - 1, a file a rank beside verl's own

Only what is trained is kept: the rest of a stream never changes. Left out: the rule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.api import WeightStream
from harness.foundation.state_files import load_state, save_state
from harness.models.adapters import named_weights
from harness.trainers.staleness import sampled_by

Shards = dict[str, Tensor]
"""Checkpoint name -> this rank's part of a trained tensor."""


def whole(tensor: Tensor, device: torch.device | int | str | None = None) -> Tensor:
    """A tensor of all ranks, each of which must ask, on a device; a parameter in float32, also where it rests in
    fewer bits."""
    found = tensor.detach().to(device)
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return found.to(torch.float32) if isinstance(tensor, nn.Parameter) else found


def own_part(tensor: Tensor) -> Tensor:
    """The memory of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Past:
    """A rank's shards of the last `age` versions and of the newest, on the CPU. None are kept at age 0."""

    def __init__(self, age: int, decoder: nn.Module) -> None:
        self.age, self.named = age, named_weights(decoder)
        self.versions: dict[int, Shards] = {}

    def keep(self, step: int) -> None:
        """Keep the weights as they are before step `step`, and forget those that no step will sample from."""
        if not self.age:
            return
        trained = [(name, own_part(tensor.detach())) for name, tensor in self.named if tensor.requires_grad]
        self.versions[step] = {name: part.to("cpu", copy=True) for name, part in trained}
        first = sampled_by(step, self.age)
        self.versions = {number: shards for number, shards in sorted(self.versions.items()) if first <= number <= step}

    def stream(self, version: int, device: torch.device | int | str | None = None) -> WeightStream:
        """Whole tensors of a version on a device (None: where the module is), by checkpoint name. Every rank must read
        it, in order. Raises RuntimeError for one that is not kept."""
        shards = self._of(version)
        for name, tensor in self.named:
            there = own_part(tensor).device if device is None else device
            if name not in shards:
                yield name, whole(tensor, there)
            elif isinstance(tensor, DTensor):
                part = shards[name].to(there)
                old = DTensor.from_local(
                    part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
                )
                yield name, old.full_tensor()
            else:
                yield name, shards[name].to(there)

    @contextmanager
    def holding(self, module: nn.Module, version: int) -> Iterator[None]:
        """Context in which the module holds a version; the newest is back afterwards. For forward passes before the
        first update of a step alone: the newest version must be what the module holds."""
        old, newest = self._of(version), self._of(max(self.versions, default=version))
        try:
            self._put(module, old)
            yield
        finally:
            self._put(module, newest)

    @torch.no_grad()
    def _put(self, module: nn.Module, shards: Shards) -> None:
        for name, tensor in self.named:
            if name in shards:
                own_part(tensor).copy_(shards[name])
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # what is gathered already would be used again

    def _of(self, version: int) -> Shards:
        if version not in self.versions:
            raise RuntimeError(f"algo.staleness={self.age}: version {version} is not kept: {sorted(self.versions)}")
        return self.versions[version]

    def save(self, path: Path, newest: int) -> None:
        """Write all versions but the newest, which is the checkpoint itself. Raises ValueError as `save_state`."""
        if self.age:
            save_state(path, {"versions": {n: shards for n, shards in self.versions.items() if n < newest}})

    def load(self, path: Path) -> None:
        """The inverse of `save`. Raises ValueError where the file is not whole."""
        if self.age:
            self.versions = load_state(path)["versions"]


class Stream:
    """Weights for one push, on a device: an iterator over the newest, or those that a step's rollouts are sampled
    with."""

    def __init__(self, newest: Callable[[], WeightStream], past: Past, device: torch.device | int | str) -> None:
        self.newest, self.past, self.device = newest, past, device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.newest()

    def for_rollouts(self, step: int) -> tuple[WeightStream, int]:
        """(weights that sample step `step`, how many steps they have behind them). Keeps the newest as version
        `step`."""
        version = sampled_by(step, self.past.age)
        self.past.keep(step)
        return (self.newest() if version == step else self.past.stream(version, self.device)), version
