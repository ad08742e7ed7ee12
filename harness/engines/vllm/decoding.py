"""Sampling through vLLM's model runner, whose scheduler is asked only where the batch changes.

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

AHEAD = 64
"""Steps between two questions to the scheduler, at most: so many tokens of cache are reserved for every request."""
RETIRE_AT = 0.125
"""Ended rows are computed on until they are this share of those that run."""


class Samples:
    """Sampled tokens and log-probs: N rows of at most T tokens."""

    def __init__(self, num_rows: int, max_new_tokens: int, *, eos_id: int, pad_id: int, vocab_size: int | None) -> None:
        """`vocab_size`: keep the whole distribution of every token; None: the sampled token's log-prob alone."""
        shape = num_rows, max_new_tokens
        self.eos_id = eos_id
        self.ids = np.full(shape, pad_id, np.int64)
        self.logp = np.zeros(shape, np.float32)
        self.lengths = np.zeros(num_rows, np.int64)
        self.has_ended = np.zeros(num_rows, np.bool_)
        """True per row that has ended by the end-of-sequence token."""
        self.log_probs = None if vocab_size is None else np.zeros((*shape, vocab_size), np.float32)

    def record(self, rows: Sequence[int], output: Any) -> None:
        """Record one step's tokens, `rows` being those of vLLM's ModelRunnerOutput; rows that ended before, and those
        whose prompt was not read to its end, have none."""
        tokens = output.sampled_token_ids
        all_rows = np.asarray(rows, np.int64)
        has_token = np.fromiter(map(len, tokens), np.int64, len(tokens)) > 0
        new = np.flatnonzero(has_token & ~self.has_ended[all_rows] & (self.lengths[all_rows] < self.ids.shape[1]))
        if not len(new):
            return
        at = all_rows[new], self.lengths[all_rows[new]]
        values, found = output.logprobs.logprobs, output.logprobs.logprob_token_ids
        sampled = found[new, 0]  # the sampled token comes first
        self.ids[at], self.logp[at] = sampled, values[new, 0]
        if self.log_probs is not None:
            self.log_probs[at[0][:, None], at[1][:, None], found[new]] = values[new]
        self.lengths[at[0]] += 1
        self.has_ended[at[0]] = sampled == self.eos_id


def sample(
    llm: Any, prompts: Sequence[Sequence[int]], sampling: Any, samples: Samples, *, lora_request: Any = None
) -> None:
    """Sample one response per prompt into `samples`. `sampling` is a `SamplingParams` with n = 1 and `logprobs`; its
    `max_tokens` is the width of `samples`."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    rows = dict[str, int]()
    try:
        with _reserved(scheduler):
            for row, prompt in enumerate(prompts):
                prompt_ids = {"prompt_token_ids": list(prompt)}
                rows[engine.add_request(str(row), prompt_ids, sampling, lora_request=lora_request)] = row
            while scheduler.has_unfinished_requests():
                planned = scheduler.schedule()
                output = _launch(executor, planned).result()
                samples.record([rows[name] for name in output.req_ids], output)
                scheduler.update_from_output(planned, output)
                if _is_repeatable(planned, scheduler):
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
def _reserved(scheduler: Any) -> Iterator[None]:
    """Context in which scheduled requests get cache for `AHEAD` more tokens."""
    usual = scheduler.num_lookahead_tokens
    scheduler.num_lookahead_tokens = AHEAD
    try:
        yield
    finally:
        scheduler.num_lookahead_tokens = usual
