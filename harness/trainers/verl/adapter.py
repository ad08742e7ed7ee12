"""Push from verl's trainer: every part transforms the weight stream, then verl sends it.

All ranks read the stream, and each sends the same tensors to its own vLLM worker, which quantizes. A push for an
evaluation is named by a step below 0 (`evaluation_step`): noise is off in it, and it is of the newest weights. With
`algo.staleness` a push for rollouts is of an earlier version, as it would have been at its own step.
"""

from __future__ import annotations

import json
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from harness.api import Step
from harness.foundation.whole_file import write_atomic
from harness.trainers.verl.job import current_job, current_method, own_socket
from harness.trainers.verl.past import Stream


def evaluation_step(index: int) -> int:
    """Step number of a push for an evaluation after `index` policy steps; its own inverse."""
    return -1 - index


class Adapter(ServerAdapter):
    """One trainer rank's line to its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = own_socket(current_job(), self.zmq_handle)

    async def update_weights(self, weights: Stream, global_steps: int | None = None, **kwargs: Any) -> None:
        """Transform and send."""
        job, composed = current_job(), current_method()
        at = 0 if global_steps is None else global_steps
        is_evaluation = at < 0
        index = evaluation_step(at) if is_evaluation else at
        stream, version = (iter(weights), index) if is_evaluation else weights.for_rollouts(index)
        purpose = "eval" if is_evaluation else "rollout"
        step = Step(index=version, total=job.config.trainer.steps, seed=job.config.seed, purpose=purpose)
        await super().update_weights(composed.sync(stream, step), global_steps=index, **kwargs)
        if self.replica_rank == 0 and self.rollout_rank == 0:  # what the parts measured, for the driver
            write_atomic(job.folder / "push.json", json.dumps(composed.memory_row()).encode())
