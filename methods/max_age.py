"""A bound on age: prompts whose oldest token was sampled too many steps ago leave the loss.

Source: PrimeIntellect-ai/prime-rl, max_off_policy_steps, default 8.
The age of a prompt is the step less the oldest version that generated any part of its responses, which share it; it is
dropped where that is above the bound. There it is dropped while it runs or waits and another takes its place; here its
tokens leave the objective and the divisors stay, so that batches keep their size. Left out: nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, Step, TokenBatch
from methods.naive import LOW_BIT


def prompt_age(version: Tensor, mask: Tensor, group: Tensor, now: int) -> Tensor:
    """[B] int64: steps between `now` and the oldest token of all responses to a row's prompt; 0 where it has none.

    version [B, T] int64, mask [B, T] bool, group [B] int64.
    """
    oldest = version.masked_fill(~mask, now).amin(1).clamp(max=now)
    by_group = oldest.new_full((int(group.max()) + 1,), now).scatter_reduce(0, group, oldest, "amin")
    return now - by_group[group]


@dataclass(frozen=True, kw_only=True)
class MaxAge(Part):
    """The bound, on tokens of a whole batch."""

    steps: int = 8
    """Largest age that is kept."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"MaxAge.steps: {self.steps} is no age (choose 0 or more)")

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"version"})

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        assert b.version is not None
        group = torch.arange(len(b.mask), device=b.mask.device) if b.group is None else b.group
        age = prompt_age(b.version, b.mask, group, b.step.index)
        return replace(c, keep=c.keep & (age <= self.steps)[:, None])


METHOD = Method(
    name="max_age",
    paper="prime-rl, max_off_policy_steps",
    parts=(MaxAge(),),
    precisions=(*LOW_BIT, "bf16"),
    denom="original",
    summary="prompts whose oldest token is too many steps old leave the loss",
    claim="a bound of 8 steps on the age of data keeps asynchronous training stable",
)
