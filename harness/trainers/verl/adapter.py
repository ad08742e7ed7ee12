"""Push from verl's trainer: every part transforms the weight stream, then verl sends it.

All ranks read the stream, and each sends the same tensors to its own vLLM worker, which quantizes. A push for an
evaluation is named by a step below 0 (`evaluation_step`): noise is off in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from harness.api import Step
from harness.records.run_result import write_atomic
from harness.trainers.verl.job import current_job, current_method, own_socket


def evaluation_step(index: int) -> int:
    """Step number of a push for an evaluation after `index` policy steps; its own inverse."""
    return -1 - index


class Adapter(ServerAdapter):
    """One trainer rank's line to its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = own_socket(current_job(), self.zmq_handle)

    async def update_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Transform and send."""
        job, composed = current_job(), current_method()
        at = 0 if global_steps is None else global_steps
        is_evaluation = at < 0
        index = evaluation_step(at) if is_evaluation else at
        step = Step(
            index=index,
            total=job.config.trainer.steps,
            seed=job.config.seed,
            purpose="eval" if is_evaluation else "rollout",
        )
        await super().update_weights(composed.sync(weights, step), global_steps=index, **kwargs)
        if self.replica_rank == 0 and self.rollout_rank == 0:  # what the parts measured, for the driver
            write_atomic(job.folder / "push.json", json.dumps(composed.memory_row()).encode())
