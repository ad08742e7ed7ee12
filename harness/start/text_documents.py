"""Documents of a text base, packed: prompt and response one after the other until a batch is full of tokens.

    step -> bucket (a range of problem sizes) -> documents of random sizes from it -> Packed

A batch is a function of (task, recipe, base seed, step), so processes that share the work change nothing, and training
resumes at any step. Batches of a bucket have one shape, which a CUDA graph needs. Left out: the training
(`harness.start.text_training`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from harness.foundation.seeds import stable_seed
from harness.tasks import Worded

MIX = ((0.12, (0.7, 0.3, 0.0, 0.0)), (0.3, (0.5, 0.3, 0.15, 0.05)), (1.0, (0.3, 0.3, 0.22, 0.18)))
"""(until this share of the steps, chances of the buckets): short documents first, long ones mixed in later."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A range of problem sizes, and the shape of its batches."""

    low: int
    high: int
    longest: int
    """Tokens of its longest document, at most the positions of the model."""
    most: int
    """Documents of a batch, at most."""


class Packed(NamedTuple):
    """One batch of N tokens."""

    bucket: int
    ids: Tensor
    """[N] int64; what is left over is padding."""
    wanted: Tensor
    """[N] float32: 1 where the next token is one of a response, which is what is learnt; else 0."""
    ends: Tensor
    """[D + 1] int32: where documents end, the first at 0; padding counts as documents, and N fills up the rest."""
    num_wanted: int
    num_used: int
    """Tokens that are not padding."""


def sized(task: Worded, n: int) -> Worded:
    """The task at another problem size."""
    return cast(Worded, dataclasses.replace(cast(Any, task), n=n))


def buckets_of(task: Worded, sizes: Sequence[int], tokens: int, positions: int) -> list[Bucket]:
    """The buckets of a curriculum: from 2 or the size before up to each of `sizes`, cut at the task's own.

    `tokens` of a batch. Raises ValueError where the longest document does not fit into a batch.
    """
    found: list[Bucket] = []
    low = min(2, task.n) if sizes else task.n
    for high in [*(size for size in sizes if size < task.n), task.n]:
        shown = sized(task, low).demonstrations(range(64), 0)
        shortest = min(len(prompt) + len(answer) for prompt, answer in shown)
        largest = sized(task, high)
        prompts = max(len(prompt) for prompt, _ in largest.demonstrations(range(64), 0))
        longest = min(-(-(3 * prompts // 2 + largest.max_new_tokens) // 64) * 64, positions)
        if longest > tokens:
            raise ValueError(f"base.batch_tokens={tokens}: a document of n={high} has up to {longest} tokens")
        found.append(Bucket(low=low, high=high, longest=longest, most=tokens // shortest + tokens // longest + 2))
        low = high + 1
    return found


def bucket_at(progress: float, chance: float, count: int) -> int:
    """The bucket of a step at `progress` of the training; `chance` from [0, 1). The last of MIX's buckets stands for
    all that come after it."""
    weights = next(shares for until, shares in MIX if progress <= until)[:count]
    chance *= sum(weights)
    for bucket, weight in enumerate(weights):
        if chance < weight:
            return bucket
        chance -= weight
    return len(weights) - 1


def pack(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], bucket: Bucket, number: int, tokens: int
) -> tuple[Packed, int]:
    """(batch, how many documents it took): (prompt, response) pairs in order until one does not fit any more; those
    longer than the bucket's longest are passed over."""
    ids, wanted = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
    ends, used, count = [0], 0, 0
    for prompt, response in documents:
        size = len(prompt) + len(response)
        if size > bucket.longest:
            count += 1
            continue
        if used + size > tokens:
            break
        ids[used : used + size] = [*prompt, *response]
        wanted[used + len(prompt) - 1 : used + size - 1] = 1.0
        used, count = used + size, count + 1
        ends.append(used)
    end = used
    while end < tokens:
        end = min(tokens, end + bucket.longest)
        ends.append(end)
    ends += [tokens] * (bucket.most + 1 - len(ends))
    assert len(ends) == bucket.most + 1
    places = torch.from_numpy(np.array(ends, np.int32))
    batch = Packed(number, torch.from_numpy(ids), torch.from_numpy(wanted), places, int(wanted.sum()), used)
    return batch, count


@dataclass(frozen=True, kw_only=True)
class Documents(Dataset[Packed]):
    """Source of the batches of one training: `documents[step]`, steps counted from 1."""

    task: Worded
    buckets: tuple[Bucket, ...]
    tokens: int
    base_seed: int
    max_steps: int

    def __getitem__(self, step: int) -> Packed:
        rng = random.Random(stable_seed(self.base_seed, "base batch", step))
        number = bucket_at(min(step / self.max_steps, 1.0), rng.random(), len(self.buckets))
        bucket, used = self.buckets[number], 0
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        tasks = {n: sized(self.task, n) for n in range(bucket.low, bucket.high + 1)}
        seed = stable_seed(self.base_seed, "base demonstrations")
        while used <= self.tokens and len(found) < bucket.most - self.tokens // bucket.longest - 1:
            size = bucket.low + int(rng.random() * (bucket.high + 1 - bucket.low))
            index = stable_seed(self.base_seed, "base document", step, len(found))
            document = tasks[size].demonstrations([index], seed)[0]
            used += len(document[0]) + len(document[1])
            found.append(document)
        return pack(found, bucket, number, self.tokens)[0]


def batches(documents: Documents, first: int, workers: int, *, is_pinned: bool) -> Iterator[Packed]:
    """The batches from step `first` on, made where they are asked for, or ahead by `workers` processes.

    `is_pinned`: in memory that a GPU copies from. Raises RuntimeError where a process has died.
    """
    loader = DataLoader(
        documents, batch_size=None, sampler=range(first, documents.max_steps + 1), num_workers=workers,
        pin_memory=is_pinned, multiprocessing_context="spawn" if workers else None, generator=torch.Generator(),
    )  # fmt: skip
    return iter(loader)
