"""The measurements on one loaded engine: a cell of the map, prefill, where a step's time goes, a whole generation.

Every time is wall time seen by the caller of `LLM`, of steps in which all sequences of the batch got one token.
Garbage is collected between cells; `loading.still` keeps it from being collected within them. The whole generation
runs with the collector on, as a user's does, and says how long that took.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from harness.studies.throughput.plan import Check, Sweep
from harness.studies.throughput.stepping import Stepper, full_steps

SLOW_START_S = 20.0
"""A first step above this is noted: kernels were compiled."""
BINS = 16
"""Stretches of a whole generation whose steps are kept, mean and median."""
SHORT = 8
"""New tokens of the generation that warms up."""
WINDOW = 64
"""Steps on either side of a context of the map that are compared with its cell."""


def step_stats(times: Sequence[float], warm: int, batch: int) -> dict[str, Any]:
    """Median, 10th and 90th percentile (ms) of the intervals after the first `warm`, and tokens/s at the median."""
    steps = [1e3 * (b - a) for a, b in pairwise(times)][warm:]
    middle = median(steps)
    return {
        "step_ms": round(middle, 4),
        "step_ms_p10": round(float(np.quantile(steps, 0.1)), 4),
        "step_ms_p90": round(float(np.quantile(steps, 0.9)), 4),
        "tokens_per_s": round(1e3 * batch / middle, 1),
        "num_steps": len(steps),
    }


def prompt_length(sweep: Sweep, length: int) -> int:
    """Tokens before decoding starts: `length` is reached in the middle of the longest run of counted steps."""
    return length - sweep.warm_steps - sweep.max_steps // 2


def most_tokens(sweep: Sweep, batch: int, before: int, *, is_filled: bool) -> int:
    """New tokens that a sequence of a cell may have: early ones decode while prompts of the others are computed."""
    early = 0 if is_filled else 2 + batch * before // max(1, sweep.prefill_tokens)
    return min(sweep.most_new_tokens + early, sweep.max_model_len - before)


def measure_cell(stepper: Stepper, sweep: Sweep, batch: int, length: int, *, is_filled: bool) -> dict[str, Any]:
    """Steady-state decoding of `batch` sequences at a context of about `length` tokens."""
    before, warm = prompt_length(sweep, length), sweep.warm_steps
    most = most_tokens(sweep, batch, before, is_filled=is_filled)
    gc.collect()
    started = time.perf_counter()
    names = stepper.add(batch, prompt_of(before), most, is_filled=is_filled)
    try:
        times = full_steps(stepper, batch, warm + sweep.max_steps, sweep.cell_s, warm + sweep.min_steps)
        context = stepper.mean_context()
    finally:
        stepper.drain(names)
    found = step_stats(times, warm - 1, batch)
    found |= {
        "context": round(context - found["num_steps"] / 2, 1),
        "is_filled": is_filled,
        "admission_s": round(times[0] - started, 3),
    }
    if found["admission_s"] > SLOW_START_S:
        found["note"] = f"first step after {found['admission_s']:.0f} s: kernels were compiled"
    return found


def prompt_of(length: int) -> list[int]:
    """Any token ids: 1 to 1000 over and over."""
    return [1 + i % 1000 for i in range(length)]


def measure_prefill(stepper: Stepper, sweep: Sweep) -> dict[str, Any]:
    """Tokens/s of one batch of `prefill_tokens` prompt tokens, eight prompts; the median of three after one warm-up."""
    each = sweep.prefill_tokens // 8
    seconds: list[float] = []
    for _ in range(4):
        started = time.perf_counter()
        stepper.add(8, prompt_of(each), 1, is_filled=False)
        stepper.finish()
        seconds.append(time.perf_counter() - started)
    middle = median(seconds[1:])
    return {"tokens": 8 * each, "seconds": round(middle, 4), "tokens_per_s": round(8 * each / middle, 1)}


def measure_breakdown(stepper: Stepper, sweep: Sweep, batch: int) -> dict[str, Any]:
    """Parts of a decode step, ms: the model's forward and sampling (head, log-probs) on the device, the host's rest.

    Device times are between events on the engine's stream, so gaps between the kernels of a part count with it.
    """
    marks: list[tuple[Any, Any, Any]] = []
    runner = stepper.runner
    forward, sample = runner._model_forward, runner._sample
    current: list[Any] = []

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        current[:] = [_mark()]
        out = forward(*args, **kwargs)
        current.append(_mark())
        return out

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        out = sample(*args, **kwargs)
        marks.append((current[0], current[1], _mark()))
        return out

    runner._model_forward, runner._sample = timed_forward, timed_sample
    try:
        found = measure_cell(stepper, sweep, batch, sweep.lengths[0], is_filled=sweep.context == "filled")
    finally:
        del runner._model_forward, runner._sample
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    steady = marks[-found["num_steps"] - 2 : -2]
    parts = {
        "forward_ms": round(median(_between(a, b) for a, b, _ in steady), 4),
        "sampling_ms": round(median(_between(b, c) for _, b, c in steady), 4),
    }
    rest = found["step_ms"] - parts["forward_ms"] - parts["sampling_ms"]
    kept = {key: found[key] for key in ("step_ms", "step_ms_p10", "step_ms_p90", "context")}
    return {**kept, **parts, "host_ms": round(rest, 4)}


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return 1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)


def measure_check(stepper: Stepper, sweep: Sweep, check: Check, tell: Callable[[int], None]) -> dict[str, Any]:
    """A whole generation from a real prompt: seconds from the first request to the last token, and its step by context.

    A short one before it, not counted, compiles what a first prefill needs. `tell` gets the tokens done, now and then.
    """
    stepper.add(check.batch, prompt_of(sweep.prompt), SHORT, is_filled=False)
    stepper.finish()
    with collecting() as collections:
        started = time.perf_counter()
        stepper.add(check.batch, prompt_of(sweep.prompt), check.length, is_filled=False)
        times: list[float] = []
        while stepper.core.scheduler.has_requests():
            if stepper.step() == check.batch:
                times.append(time.perf_counter())
                if len(times) % 1024 == 0:
                    tell(len(times))
        stepper.finish()
        seconds = time.perf_counter() - started
    return {
        "batch": check.batch,
        "length": check.length,
        "prompt": sweep.prompt,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(check.batch * check.length / seconds, 1),
        "admission_s": round(times[0] - started, 3),
        "stepping_s": round(times[-1] - times[0], 3),
        "collecting_s": round(sum(collections), 3),
        "num_collections": len(collections),
        **check_steps(times, sweep.prompt, sweep.lengths),
    }


def check_steps(times: Sequence[float], prompt: int, lengths: Sequence[int]) -> Mapping[str, Any]:
    """Times of a whole generation's full steps: "steps" by stretch, and "windows" around the contexts of the map."""
    taken = [1e3 * (b - a) for a, b in pairwise(times)]
    width = max(1, len(taken) // BINS)
    stretches = [(at, at + width) for at in range(0, len(taken) - width + 1, width)]
    around = [(n - prompt - WINDOW, n - prompt + WINDOW) for n in lengths]
    windows = [(max(0, a), min(len(taken), b)) for a, b in around]
    return {
        "steps": [_stretch(taken, prompt, a, b) for a, b in stretches],
        "windows": [_stretch(taken, prompt, a, b) for a, b in windows if b - a >= WINDOW],
    }


def _stretch(taken: Sequence[float], prompt: int, start: int, end: int) -> dict[str, Any]:
    """Mean, median and spread of steps `start` to `end`, ms, and the context in their middle."""
    steps = taken[start:end]
    return {
        "context": prompt + (start + end) // 2,
        "step_ms": round(sum(steps) / len(steps), 4),
        "median_ms": round(median(steps), 4),
        "p10_ms": round(float(np.quantile(steps, 0.1)), 4),
        "p90_ms": round(float(np.quantile(steps, 0.9)), 4),
    }


@contextmanager
def collecting() -> Iterator[list[float]]:
    """The garbage collector on; the list fills with the seconds of each collection."""
    taken: list[float] = []
    started = [0.0]

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started[0] = time.perf_counter()
        else:
            taken.append(time.perf_counter() - started[0])

    was_on = gc.isenabled()
    gc.callbacks.append(seen)
    gc.enable()
    try:
        yield taken
    finally:
        gc.callbacks.remove(seen)
        if not was_on:
            gc.disable()
