"""Sampler that verl loads by path (`trainer.v1.sampler.custom_sampler`): a replay buffer asked more than every 2 s.

verl 0.9.1 looks for finished generations every `poll_interval` = 2.0 s, which no setting changes; a step of a small
model is then mostly waiting. Everything else is verl's own.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickBuffer(ReplayBuffer):
    """verl's buffer, with `poll_interval` and batch sizes from `sampler_kwargs`."""

    def __init__(self, sampler_kwargs: Any, **kwargs: Any) -> None:
        own = ("poll_interval", "train_batch_size", "gen_batch_size")
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs, **{name: sampler_kwargs[name] for name in own})
