"""The moments at which a run saves a state to resume from, so that saving takes a bounded share of its time.

A state of a 7B model has some 90 GB: saved every 20 seconds it would take longer than training. Left out: how a state
is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness.config.schema import Launch


class CheckpointClock:
    """Due times of states, by steps or by the time since the last one.

    By steps one is due after every `checkpoint_every_steps`, else by the clock after `checkpoint_every_s`. In both
    cases the last one must have cost at most `checkpoint_share` of the time since it began; a moment that comes too
    early is left out. `checkpoint_every_s=0` asks for one after every step and gets it.
    """

    def __init__(self, launch: Launch) -> None:
        self.every_s, self.every_steps = launch.checkpoint_every_s, launch.checkpoint_every_steps
        self.share = launch.checkpoint_share
        self.last, self.cost_s = time.monotonic(), 0.0

    def is_due(self, step: int) -> bool:
        """Is a state due after `step` steps?"""
        since, pause = time.monotonic() - self.last, self.cost_s * (1 / self.share - 1)
        if self.every_steps:
            return step % self.every_steps == 0 and since >= pause
        return since >= max(self.every_s, pause) or not self.every_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a state that is saved within."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.last = time.monotonic()
            self.cost_s = self.last - start
