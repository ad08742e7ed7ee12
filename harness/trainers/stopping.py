"""Responses ended at a text of their task (`task.options.stop`), in training and evaluation alike."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.api import Rollout
from harness.tasks import Stopping, Task


def stopped(rollout: Rollout, task: Task) -> Rollout:
    """A rollout whose responses end where the task says (`Stopping`). What came before was sampled as it would have
    been by an engine that stops there."""
    if not isinstance(task, Stopping):
        return rollout
    kept = torch.tensor([task.num_kept(response) for response in rollout.responses()]).to(rollout.lengths)
    is_cut = kept < rollout.lengths
    if not is_cut.any():
        return rollout
    places = torch.arange(rollout.token_ids.shape[1], device=kept.device)
    is_left = (places >= kept[:, None]) & (places < rollout.lengths[:, None])
    return replace(
        rollout, lengths=kept, truncated=rollout.truncated & ~is_cut, logp=rollout.logp.masked_fill(is_left, 0.0),
        token_ids=rollout.token_ids.masked_fill(is_left, task.pad_id),
    )  # fmt: skip
