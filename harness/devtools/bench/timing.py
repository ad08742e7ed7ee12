"""Timing of calls: wall, process and device time, contestants in turns, and where time goes inside a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import torch

T = TypeVar("T")
AHEAD = 400_000_000
"""Clock cycles, about 0.2 s, that a GPU waits so that everything measured is queued before it begins."""


def wait(device: str) -> None:
    """Wait until the device has done everything it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], T], device: str) -> tuple[float, T]:
    """(wall time of one call, what it returned), the device waited for on both sides."""
    wait(device)
    started = time.perf_counter()
    found = call()
    wait(device)
    return time.perf_counter() - started, found


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Wall time of one call, the device waited for on both sides."""
    return timed(call, device)[0]


def cpu_seconds(call: Callable[[], object]) -> float:
    """Process CPU time of one call, which other processes of the machine do not lengthen."""
    started = time.process_time()
    call()
    return time.process_time() - started


def device_seconds(call: Callable[[], object], device: str, ahead: int = 0) -> float:
    """One call: device time between two CUDA events, or wall time on a CPU. `ahead`: clock cycles that the GPU waits
    first, in which the call's launches are queued."""
    if device == "cpu":
        return seconds(call)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(ahead)  # pyright: ignore[reportPrivateUsage]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    clock: Callable[[Callable[[], object]], T],
    warm_up: int,
    repeats: int,
) -> dict[str, list[T]]:
    """Contestant -> what `clock` says of its measured calls, in which they take turns."""
    times: dict[str, list[T]] = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            spent = clock(call)
            if turn >= warm_up:
                times[name].append(spent)
    return times


def host_seconds(call: Callable[[], object], device: str) -> float:
    """Wall time until one call returns, its work on the device not waited for."""
    wait(device)
    spent = seconds(call)
    wait(device)
    return spent


def queued_seconds(call: Callable[[], object], device: str) -> float | None:
    """Device time of one call whose launches were all queued before, so without the host's; None without a GPU.

    Holds for up to some hundred launches: a queue takes about a thousand.
    """
    return device_seconds(call, device, AHEAD) if device == "cuda" else None


def summary(times: Sequence[float]) -> dict[str, float]:
    """Seconds -> milliseconds: median, nearest-rank 90th percentile, extremes."""
    ordered = sorted(1e3 * value for value in times)
    return {"median_ms": median(ordered), "p90_ms": ordered[ceil(0.9 * len(ordered)) - 1], "min_ms": ordered[0],
            "max_ms": ordered[-1], "count": len(ordered)}  # fmt: skip


@contextmanager
def watched(targets: Mapping[str, tuple[Any, str]], device: str) -> Iterator[dict[str, float]]:
    """Stage -> seconds, summed over its calls inside the block, the device waited for on both sides of each.

    `targets`: stage -> (owner, name of its function). Stages must not call each other.
    """
    spent = dict.fromkeys(targets, 0.0)

    def counted(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            took, found = timed(lambda: function(*args, **kwargs), device)
            spent[stage] += took
            return found

        return call

    with ExitStack() as stack:
        for stage, (owner, name) in targets.items():
            stack.enter_context(patch.object(owner, name, counted(stage, getattr(owner, name))))
        yield spent


def breakdown(totals: Sequence[float], stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of some calls and of their stages -> median milliseconds by stage, and "rest": what no stage holds."""
    rows = [dict(found) | {"rest": total - sum(found.values())} for total, found in zip(totals, stages, strict=True)]
    return {stage: 1e3 * median(row[stage] for row in rows) for stage in rows[0]}
