"""What leaves the trainer at a push: every part transforms the weight stream, then verl sends it.

All ranks read the stream, and each sends the same tensors to its own vLLM worker, which quantizes. A push for an
evaluation is named by a step below 0 (`evaluation_step`): noise is off in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from harness.api import Step
from harness.results import write_atomic
from harness.trainers.verl.job import current_job, current_method


def evaluation_step(index: int) -> int:
    """How a push for an evaluation after `index` policy steps is called; its own inverse."""
    return -1 - index


class Adapter(ServerAdapter):
    """One trainer rank's line to its server."""

    async def update_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Transform and send."""
        job, composed = current_job(), current_method()
        at = 0 if global_steps is None else global_steps
        is_evaluation = at < 0
        index = evaluation_step(at) if is_evaluation else at
        step = Step(
            index=index, total=job.config.trainer.steps, seed=job.config.seed,
            purpose="eval" if is_evaluation else "rollout",
        )  # fmt: skip
        await super().update_weights(composed.sync(weights, step), global_steps=index, **kwargs)
        if self.replica_rank == 0 and self.rollout_rank == 0:
            self._tell(step)

    def _tell(self, step: Step) -> None:
        """Leave what the parts measured for the driver."""
        import json

        composed = current_method()
        found = {f"part/{type(part).__name__}.{name}": value
                 for part, memory in zip(composed.parts, composed.memory, strict=True)
                 for name, value in memory.items()}  # fmt: skip
        write_atomic(current_job().folder / "push.json", json.dumps(found).encode())
