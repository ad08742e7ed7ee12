"""Prompts and answers of one rollout batch in verl's queue, by the local trainer's rule.

Prompts are drawn in the run's own order and a generation batch is answered whole; which of its groups are kept is said
by `harness.trainers.dynamic_sampling`. verl's own dynamic sampling refills prompt by prompt, as answers come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from harness.config.schema import AlgoConfig
from harness.tasks import Item
from harness.trainers.dynamic_sampling import filled
from harness.trainers.verl.data import prompt_row


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The answers of a rollout batch, those of a prompt adjacent."""

    batch: KVBatchMeta
    num_tokens: int
    """Tokens of all answers, dropped ones too."""
    num_batches: int
    """Generation batches that it took."""


def prompt_batch(items: Sequence[Item]) -> tuple[list[str], TensorDict]:
    """(a name of each prompt, the columns that verl's agent loops read)."""
    uids = [str(uuid4()) for _ in items]
    rows = [
        prompt_row(item, "train", "")
        | {"uid": uid, "index": item.index, "raw_prompt": [], "dummy_tensor": torch.tensor([0], dtype=torch.uint8)}
        for item, uid in zip(items, uids, strict=True)
    ]
    return uids, tu.get_tensordict(collate_fn(rows))


def collected(algo: AlgoConfig, draw: Callable[[], list[str]], wait: Callable[[int], KVBatchMeta]) -> Sampled:
    """One rollout batch; what is not kept leaves the queue. Raises ValueError as `filled`.

    `draw` submits the next prompts and returns their names in order, `wait(n)` returns the answers to n prompts once
    all are there.
    """
    batches: list[KVBatchMeta] = []

    def sample() -> list[float]:
        uids = draw()
        batches.append(in_order(wait(len(uids)), uids, algo.group_size))
        keys, partition = batches[-1].keys, batches[-1].partition_id
        found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["extra_fields"])
        return [extra["reward_extra_info"]["acc"] for extra in found.pop("extra_fields").tolist()]

    kept = filled(algo, sample)
    keys, tags = [], []
    for batch, rows in zip(batches, kept, strict=True):
        keys += [batch.keys[i] for i in rows]
        tags += [batch.tags[i] for i in rows]
    partition, all_keys = batches[0].partition_id, [key for batch in batches for key in batch.keys]
    if dropped := sorted(set(all_keys) - set(keys)):
        tq.kv_clear(keys=dropped, partition_id=partition)
    return Sampled(
        batch=KVBatchMeta(keys=keys, tags=tags, partition_id=partition),
        num_tokens=sum(tag["response_len"] for batch in batches for tag in batch.tags),
        num_batches=len(batches),
    )


def in_order(batch: KVBatchMeta, uids: Sequence[str], group_size: int) -> KVBatchMeta:
    """The answers by the order in which their prompts were drawn. Raises RuntimeError where some are missing: verl
    would go on without them."""
    place = {uid: number for number, uid in enumerate(uids)}

    def at(key: str) -> tuple[int, int]:  # a key is UID_SESSION_INDEX
        uid, session, _ = key.rsplit("_", 2)
        return place[uid], int(session)

    if missing := len(uids) * group_size - len(batch.keys):
        raise RuntimeError(f"{missing} of {len(uids) * group_size} answers are missing; verl.log says why")
    return batch.select_keys(sorted(batch.keys, key=at))
