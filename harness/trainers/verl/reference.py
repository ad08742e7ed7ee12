"""Evaluation of a run under verl outside of verl: its module, and its accuracy in the reference precision.

verl samples in the run's own precision alone, so what runs are compared by is measured here, before and after, with the
embedded engine, as `harness.run.loop.evaluate` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from harness.api import Plan
from harness.config.compose import Composed
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.adapters import named_weights
from harness.models.checkpoint import empty_decoder, load_decoder, read_tensors
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named
from harness.records.run_result import EvalRecord
from harness.start.prepare import held_out, task_of
from harness.tasks import token_ids
from harness.trainers.evaluation import REFERENCE, evaluation
from harness.trainers.local.policy import policy
from harness.trainers.local.trainer import policy_weights
from harness.trainers.verl.job import VerlJob


def policy_of(
    job: VerlJob, composed: Composed, *, is_empty: bool = False, masters: Iterable[tuple[str, Tensor]] | None = None
) -> Decoder:
    """The module that the local trainer would train, wrapped by every part, at the run's start, or with `masters`.
    Raises ValueError where those are not all of its weights.

    `is_empty`: on the meta device, no weight read; another rank's values are to come.
    """
    if is_empty:
        return policy(empty_decoder(job.model), composed, job.config.base_seed, "emulated").to("meta")
    model = policy(load_decoder(job.model), composed, job.config.base_seed, "emulated")
    if masters is not None:
        missing = dict(named_weights(model))
        with torch.no_grad():
            for name, tensor in masters:
                missing.pop(name).copy_(tensor)
        if missing:
            raise ValueError(f"{job.final_folder}: {len(missing)} weights are missing, {min(missing)} among them")
    return model


def final_weights(job: VerlJob) -> Iterator[tuple[str, Tensor]]:
    """Masters after the last step by checkpoint name, one in memory at a time; none where the run did not get there."""
    return read_tensors(job.final_folder) if job.final_folder.exists() else iter(())


@torch.no_grad()
def evaluated(job: VerlJob, composed: Composed, model: Decoder, step: int) -> EvalRecord:
    """Sampled accuracy of a module of `policy_of` on the held-out questions in the reference precision."""
    config, task, device = job.config, task_of(job.config), job.config.trainer.device
    engine = EmbeddedEngine(
        model.config, Plan(rollout_weights=format_named(REFERENCE)), max_batch=config.engine.max_batch,
        device=device, for_evaluation=True, **token_ids(task),
    )  # fmt: skip
    named = ((name, tensor.detach()) for name, tensor in named_weights(model))
    engine.load_weights(policy_weights(model, named, composed.plan.adapters))
    record = evaluation(
        engine, "reference", config=config, task=task, items=held_out(config, task),
        max_new_tokens=job.max_new_tokens, step=step,
    )  # fmt: skip
    engine.close()
    return record
