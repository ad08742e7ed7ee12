"""Sampling through vLLM's model runner, whose scheduler is asked only where the batch changes.

Where the cache holds the whole batch to its last token, `device_loop.py` takes over after the prompts, and the
scheduler is told at the end. Elsewhere:

    add the requests
    while one is unfinished:
        schedule -> run -> the scheduler takes the tokens     a step as vLLM's engine makes it
        was that one more token for every running request?    repeat it, counters moved on, until rows have ended, one
                                                              is full or 64 are made; then tell the scheduler at once

vLLM asks its scheduler and its output processor about every request at every token: on a host of 2026 some 30 us each,
8 ms a step of 256 rows, when a small model's step takes a GPU 1 ms. Here both are asked once for many tokens. What is
computed is the same: the runner gets the very inputs that vLLM would give it, and where no row ends early, the same
tokens come out. The scheduler reserves cache for the steps ahead, as it does for speculative decoding. With
asynchronous scheduling (CUDA) the next step is launched before the last one's tokens are read. Left out: speculative
decoding, stop strings, penalties that need the output processor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from harness.engines.vllm.device_loop import DeviceLoop
from harness.engines.vllm.samples import Samples
from harness.foundation.life import LIFE

AHEAD = 64
"""Steps between two questions to the scheduler, at most: so many tokens of cache are reserved for every request."""
RETIRE_AT = 0.125
"""Ended rows are computed on until they are this share of those that run."""


def sample(
    llm: Any, prompts: Sequence[Sequence[int]], sampling: Any, samples: Samples, *, lora_request: Any = None,
    loop: DeviceLoop | None = None,
) -> None:  # fmt: skip
    """Sample one response per prompt into `samples`. `sampling` is a `SamplingParams` with n = 1 and `logprobs`; its
    `max_tokens` is the width of `samples`. `loop`: takes the whole batch over after the prompts, where it fits."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    rows, width = dict[str, int](), samples.ids.shape[1]
    takes_whole = loop is not None and _holds_whole(scheduler, prompts, width)
    try:
        with _reserved(scheduler, width if takes_whole else AHEAD):
            for row, prompt in enumerate(prompts):
                prompt_ids = {"prompt_token_ids": list(prompt)}
                rows[engine.add_request(str(row), prompt_ids, sampling, lora_request=lora_request)] = row
            while scheduler.has_unfinished_requests():
                LIFE.alive()
                planned = scheduler.schedule()
                output = _launch(executor, planned).result()
                samples.record([rows[name] for name in output.req_ids], output)
                scheduler.update_from_output(planned, output)
                if not _is_repeatable(planned, scheduler):
                    continue
                if loop is not None and takes_whole and loop.takes(scheduler):
                    _finish(core, loop, planned, prompts, sampling.temperature, samples, rows)
                else:
                    _repeat(core, planned, samples, rows)
    finally:
        engine.abort_request(list(rows), internal=True)


def _launch(executor: Any, planned: Any) -> Any:
    """Start a step: a future of its ModelRunnerOutput."""
    begun = executor.execute_model(planned, non_block=True)
    return begun if begun.result() is not None else executor.sample_tokens(None, non_block=True)


def _is_repeatable(planned: Any, scheduler: Any) -> bool:
    """Did every request that still runs get one more token, and nothing else happen?"""
    return (
        not planned.scheduled_new_reqs
        and not planned.scheduled_cached_reqs.resumed_req_ids
        and len(scheduler.running) == len(planned.num_scheduled_tokens) == planned.total_num_scheduled_tokens > 0
        and all(request.num_tokens == request.num_computed_tokens + 1 for request in scheduler.running)
    )


def _holds_whole(scheduler: Any, prompts: Sequence[Sequence[int]], width: int) -> bool:
    """Does the cache hold every row from its first token to its last, all at once?"""
    pool, block = scheduler.kv_cache_manager.block_pool, scheduler.block_size
    needed = sum(-(-(len(prompt) + width) // block) for prompt in prompts)
    return len(prompts) <= scheduler.max_num_running_reqs and needed <= pool.get_num_free_blocks()


def _finish(
    core: Any, loop: DeviceLoop, planned: Any, prompts: Sequence[Sequence[int]], temperature: float, samples: Samples,
    rows: dict[str, int],
) -> None:  # fmt: skip
    """Sample every running request to its end on the device, and tell the scheduler."""
    names = list(planned.num_scheduled_tokens)
    index = np.array([rows[name] for name in names])
    before = samples.lengths[index]
    lengths = np.array([len(prompts[row]) for row in index])
    steps = loop.run(samples, names, index, lengths, temperature=temperature)
    _tell(core.scheduler, samples, names, index, before, steps)


def _repeat(core: Any, planned: Any, samples: Samples, rows: dict[str, int]) -> None:
    """Make the step `planned` again and again, and tell the scheduler at the end."""
    names = list(planned.num_scheduled_tokens)
    index = np.array([rows[name] for name in names])
    before, width = samples.lengths[index], samples.ids.shape[1]
    launched, limit = deque[Any](), min(AHEAD, width - int(before.max()))
    steps = 0
    for step in range(1, limit + 1):
        launched.append(_launch(core.model_executor, _moved(planned, step)))
        steps = step
        if len(launched) == core.batch_queue_size:
            _take(launched.popleft(), samples, rows)
            if samples.has_ended[index].sum() >= max(1.0, RETIRE_AT * len(index)):
                break
    while launched:
        _take(launched.popleft(), samples, rows)
    _tell(core.scheduler, samples, names, index, before, steps)


def _take(future: Any, samples: Samples, rows: dict[str, int]) -> None:
    output = future.result()
    LIFE.alive()
    samples.record([rows[name] for name in output.req_ids], output)


def _moved(planned: Any, step: int) -> Any:
    """The plan that vLLM's scheduler would make `step` tokens after `planned`."""
    cached = planned.scheduled_cached_reqs
    moved = replace(
        cached, all_token_ids={}, new_block_ids=[None] * len(cached.req_ids),
        num_computed_tokens=[count + step for count in cached.num_computed_tokens],
        num_output_tokens=[count + step for count in cached.num_output_tokens],
    )  # fmt: skip
    return replace(planned, scheduled_cached_reqs=moved, finished_req_ids=set(), new_block_ids_to_zero=None)


def _tell(scheduler: Any, samples: Samples, names: Sequence[str], index: Any, before: Any, steps: int) -> None:
    """Tell vLLM's scheduler the tokens of `steps` steps, and the requests that are finished."""
    from vllm.v1.request import RequestStatus

    stopped, full = list[str](), list[str]()
    for name, row, start in zip(names, index, before, strict=True):
        end = int(samples.lengths[row])
        request = scheduler.requests[name]
        request.append_output_token_ids(samples.ids[row, start:end].tolist())
        request.num_computed_tokens += steps
        if samples.has_ended[row]:
            stopped.append(name)
        elif end == samples.ids.shape[1]:
            full.append(name)
    scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
    scheduler.finish_requests(full, RequestStatus.FINISHED_LENGTH_CAPPED)


@contextmanager
def _reserved(scheduler: Any, ahead: int) -> Iterator[None]:
    """Context in which scheduled requests get cache for `ahead` more tokens."""
    usual = scheduler.num_lookahead_tokens
    scheduler.num_lookahead_tokens = ahead
    try:
        yield
    finally:
        scheduler.num_lookahead_tokens = usual
