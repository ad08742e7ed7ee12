"""Wall time per stage of a step; on a GPU a stage ends when its kernels have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("generate", "reward", "sync", "old_logp", "update", "eval", "other")


class Clock:
    """Adds up seconds by stage; what no stage claims is `other`."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._start = self._now()

    def _now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[stage] += self._now() - start

    def stop(self) -> dict[str, float]:
        """Seconds by stage since the clock was made, `other` included."""
        total = self._now() - self._start
        self.seconds["other"] = total - sum(s for name, s in self.seconds.items() if name != "other")
        return self.seconds
