"""Prompts of a rollout batch under dynamic sampling (DAPO, arXiv 2503.14476), one rule for both trainers. Pure.

Left out: how prompts are answered and scored, which is each trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.config.schema import AlgoConfig
from harness.objective.advantage import informative_groups


def num_drawn(algo: AlgoConfig) -> int:
    """Prompts of one generation batch."""
    return algo.gen_prompts or algo.num_prompts


def filled(algo: AlgoConfig, sample: Callable[[], Sequence[float]]) -> list[list[int]]:
    """Rows that are kept of each generation batch, in order, until `num_prompts` groups are there.

    `sample` answers the next prompts and returns the raw rewards, those of a prompt adjacent. Without dynamic sampling
    one batch is kept whole; with it, prompts whose answers all earn the same are dropped, and what is more than a batch
    needs. Raises ValueError after `max_gen_batches`.
    """
    kept: list[list[int]] = []
    room = algo.num_prompts
    while room:
        if algo.max_gen_batches and len(kept) >= algo.max_gen_batches:
            raise ValueError(
                f"algo.max_gen_batches={algo.max_gen_batches}: only {algo.num_prompts - room} of {algo.num_prompts} "
                "prompts had samples that differ in reward"
            )
        rewards = sample()
        rows = chosen_rows(rewards, algo.group_size, room) if algo.dynamic_sampling else list(range(len(rewards)))
        kept.append(rows)
        room -= len(rows) // algo.group_size
    return kept


def chosen_rows(rewards: Sequence[float], group_size: int, room: int) -> list[int]:
    """Rows of the first `room` groups whose raw rewards differ."""
    is_kept = informative_groups(torch.tensor(rewards), torch.arange(len(rewards)) // group_size)
    groups = is_kept.nonzero().flatten()[:room].tolist()
    return [g * group_size + i for g in groups for i in range(group_size)]
