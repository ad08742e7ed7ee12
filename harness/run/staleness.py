"""Stale rollouts under the local trainer: the versions that a run keeps, and what its sampler gets of them.

    step t: keep the trainer's weights t -> the sampler gets weights max(0, t - k) -> responses -> updates -> t + 1

The rule is `harness.trainers.staleness`. A version is pushed as it would have been at its own step: through every part
with the adapters and scales of that step. A sampler that is the trainer's own module (`sampler=trainer`) samples while
the module holds the version; its log-probs are then those of the stored policy bit for bit, which every step asserts.
Responses whose tokens come from several versions: `harness.run.partial`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Rollout, Sequences, Step, WeightStream
from harness.config.compose import Composed
from harness.models.adapters import fitting_weights
from harness.run.run import Run, Version
from harness.trainers.staleness import is_scored, sampled_by


def keep(run: Run, step: Step) -> None:
    """Keep the trainer's weights before a step, and forget those that no step will sample from."""
    age = run.config.algo.staleness
    if age:
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in run.trainer.weights()}
        now = Version(step=step.index, weights=weights, fixed=dict(run.composed.fixed))
        run.past = [version for version in [*run.past, now] if version.step >= sampled_by(step.index, age)]


def synced(run: Run, step: Step, composed: Composed) -> WeightStream:
    """Weights for a rollout engine, through every part of `composed`, the run's method under the engine's plan: the
    trainer's own, or for the rollouts of a run with `algo.staleness` the oldest that are kept. Scales that the trainer
    holds travel to engines that have the weight in the trainer's format."""
    held = run.composed.plan
    if not run.past or step.purpose != "rollout":
        return composed.sync(fitting_weights(run.trainer.weights(), held, composed.plan), step)
    old, device = run.past[0], run.trainer.parameters[0].device
    weights = ((name, tensor.to(device)) for name, tensor in old.weights.items())
    stream = fitting_weights(weights, held, composed.plan)
    return replace(composed, fixed=old.fixed).sync(stream, replace(step, index=old.step))


def versions(run: Run, rollout: Rollout, step: Step) -> Tensor:
    """[B, T] int64: the step whose weights sampled each token (`TokenBatch.version`)."""
    if rollout.version is not None:
        return rollout.version.to(run.trainer.parameters[0].device)
    sampled_at = run.past[0].step if run.past else step.index
    return torch.full(rollout.token_ids.shape, sampled_at, device=run.trainer.parameters[0].device)


def sampling(run: Run) -> AbstractContextManager[None]:
    """Context of a step's push and rollouts: a module that samples for itself holds the version that is due."""
    if not run.past or not is_own_module(run):
        return nullcontext()
    return run.trainer.holding(run.past[0].weights)


def is_own_module(run: Run) -> bool:
    """Is the sampler the trainer's module?"""
    return run.composed.plan.sampler == "trainer"


def stale_logp(run: Run, seqs: Sequences, step: Step) -> Tensor | None:
    """[B, T] float32 nats of the weights that sampled, by the trainer's own forward pass; None without staleness, and
    where the step needs none: it costs a pass over the batch."""
    if not run.past or not (is_scored(step) or is_own_module(run)):
        return None
    with run.trainer.holding(run.past[0].weights):
        return run.trainer.score(seqs).logp
