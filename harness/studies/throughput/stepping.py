"""Driving a bare `vllm.LLM` one engine step at a time, in this process, with the tokens of every step counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

FILLED = {"kv_transfer_params": {"is_filled": True}}
"""`extra_args` of a request whose context `harness.studies.throughput.connector` takes as there."""


class Stepper:
    """Owner of a `vllm.LLM` whose engine core lives in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.core.request_block_hasher = None  # of use to prefix caching alone; a second per 256 prompts of 16K
        self._tokens = 0
        self._count = 0
        inner = self.engine.engine_core.get_output

        def counted() -> Any:
            outputs = inner()
            self._tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
            return outputs

        self.engine.engine_core.get_output = counted

    @property
    def runner(self) -> Any:
        """The model runner of the only worker."""
        return self.engine.model_executor.driver_worker.worker.model_runner

    @property
    def block_size(self) -> int:
        """Tokens of a cache block."""
        return self.engine.vllm_config.cache_config.block_size

    @property
    def num_blocks(self) -> int:
        """Cache blocks that requests can have; the engine keeps one as a null block."""
        return self.engine.vllm_config.cache_config.num_gpu_blocks - 1

    def add(self, batch: int, prompt: Sequence[int], max_tokens: int, *, is_filled: bool) -> list[str]:
        """Queue `batch` requests: temperature 1, log-prob of the sampled token, no end. Returns their ids."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(FILLED) if is_filled else None,
        )
        names = [f"r{self._count + i}" for i in range(batch)]
        self._count += batch
        for name in names:
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return names

    def step(self) -> int:
        """One engine step; new tokens of all sequences that it brought (0 while asynchronous scheduling fills up)."""
        self._tokens = 0
        self.engine.step()
        return self._tokens

    def mean_context(self) -> float:
        """Tokens of the running sequences, on average."""
        running = self.core.scheduler.running
        return sum(request.num_tokens for request in running) / len(running)

    def drain(self, names: Sequence[str]) -> None:
        """Abort requests and step until the engine holds none."""
        self.engine.abort_request(list(names))
        self.finish()

    def finish(self) -> None:
        """Step until the engine holds no request and no batch in flight."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()


def full_steps(
    stepper: Stepper, batch: int, wanted: int, budget_s: float, least: int, patience: int = 400
) -> list[float]:
    """Times (s, `perf_counter`) at which steps of `batch` tokens arrived, in a row.

    Ends with `wanted` of them, or with `least` once `budget_s` has passed since the first. Raises RuntimeError where
    the sequences do not all run at once.
    """
    times: list[float] = []
    for _ in range(patience + wanted):
        tokens = stepper.step()
        if tokens == 0:
            continue
        if tokens != batch:  # admission is not over, or a sequence has ended
            times.clear()
            continue
        times.append(time.perf_counter())
        if len(times) >= wanted or (len(times) >= least and times[-1] - times[0] >= budget_s):
            return times
    raise RuntimeError(f"{batch} sequences never ran together for {wanted} steps")
