"""Order of a run's training prompts: hashed indices, or shuffled epochs where the data is finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.foundation.seeds import generator, stable_seed


def prompt_indices(seed: int, positions: Sequence[int], num_train: int | None) -> list[int]:
    """Indices of the items at `positions` of a run's own order.

    `num_train`: items that there are, each drawn once an epoch; None: any index is an item.
    """
    if num_train is None:
        return [stable_seed(seed, "prompt", i) % 2**31 for i in positions]
    size = num_train
    orders = {
        e: torch.randperm(size, generator=generator("cpu", seed, "epoch", e)) for e in {i // size for i in positions}
    }
    return [int(orders[i // size][i % size]) for i in positions]
