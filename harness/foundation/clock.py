"""Wall time per stage of a step, and on a GPU its peaks of memory; there a stage ends when its kernels have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STAGES = ("generate", "reward", "sleep", "sync", "old_logp", "update", "eval", "other")
WEIGHED = ("generate", "sync", "old_logp", "update")
"""Stages whose peak of memory is told."""
GIB = 2**30


class Clock:
    """Adds up seconds by stage; what no stage claims is `other`. On a GPU it resets torch's peaks at every border."""

    def __init__(self, device: str, lent: Callable[[], float] = float) -> None:
        """`lent`: GiB that a sleeping engine has given back at the moment. torch counts them as allocated all the
        same, so peaks are told without them."""
        self.is_cuda, self.lent = device == "cuda", lent
        self._lent = lent()
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.stage_gib: dict[str, float] = {}
        """Peak of allocated memory by stage of WEIGHED; empty on a CPU."""
        self.peaks: dict[str, float] = {}
        """"allocated" and "reserved" over all stages, and since the clock before this one; empty on a CPU."""
        self._border()
        self._start = time.perf_counter()

    def _border(self) -> float:
        """Wait for the kernels so far; GiB allocated at most since the border before this one."""
        if not self.is_cuda:
            return 0.0
        torch.cuda.synchronize()
        found = torch.cuda.memory_stats_as_nested_dict()
        before, self._lent = self._lent, self.lent()
        asleep = min(before, self._lent)  # from one border to the other, not on the way
        gib = {
            kind: found[f"{kind}_bytes"]["all"]["peak"] / GIB - asleep for kind in ("allocated", "reserved") if found
        }
        self.peaks = {kind: max(value, self.peaks.get(kind, 0.0)) for kind, value in gib.items()}
        torch.cuda.reset_peak_memory_stats()
        return gib.get("allocated", 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._border()
        start = time.perf_counter()
        try:
            yield
        finally:
            gib = self._border()
            self.seconds[stage] += time.perf_counter() - start
            if self.is_cuda and stage in WEIGHED:
                self.stage_gib[stage] = max(gib, self.stage_gib.get(stage, 0.0))

    def stop(self) -> dict[str, float]:
        """Seconds by stage since the clock was made, `other` included."""
        self._border()
        total = time.perf_counter() - self._start
        self.seconds["other"] = total - sum(s for name, s in self.seconds.items() if name != "other")
        return self.seconds

    def memory(self) -> dict[str, float]:
        """The columns of a step's memory; none on a CPU."""
        reserved = {"memory/reserved_gib": self.peaks["reserved"]} if self.peaks else {}
        return {f"memory/{stage}_gib": value for stage, value in self.stage_gib.items()} | reserved
