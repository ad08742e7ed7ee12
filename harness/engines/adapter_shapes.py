"""Shapes of the low-rank adapters that a plan has beside linear layers, and the check of a push against them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.numerics.formats import Adapters


def adapter_shapes(adapters: Adapters, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every adapter by checkpoint name: A [rank, K] and B [N, rank] beside each target of weight [N, K].
    `shapes`: the model's. Raises ValueError for a target that is no linear layer."""
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    names = {module.rpartition(".")[2] for module in linears}
    if unknown := sorted(set(adapters.targets) - names):
        valid = ", ".join(sorted(names))
        raise ValueError(f"adapters.targets: {unknown[0]} is no linear layer; choose from {valid}")
    wanted: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in linears.items():
        if module.rpartition(".")[2] in adapters.targets:
            wanted[f"{module}.lora_A.weight"] = adapters.rank, columns
            wanted[f"{module}.lora_B.weight"] = rows, adapters.rank
    return wanted


def check_adapters(wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for missing, unexpected or misshapen adapters of a stream. `wanted`: as `adapter_shapes` gives
    them; empty for a plan without adapters."""
    if tensors and not wanted:
        raise ValueError(f"{min(tensors)}: the plan has no adapters at the rollout; stream merged weights")
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"weight stream: adapter {name} is {'missing' if name in wanted else 'not planned'}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the plan needs {shape}")
