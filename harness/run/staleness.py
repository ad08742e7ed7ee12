"""Stale rollouts: the sampler holds the weights of earlier steps, as in asynchronous training (`algo.staleness`).

    step t: keep the trainer's weights t -> the sampler gets weights max(0, t - k) -> responses -> updates -> t + 1

k counts steps, one rollout batch with all its updates, as asynchronous systems do: a version of the weights is what a
step leaves (AReaL's `max_head_offpolicyness`, prime-rl's async level, NeMo-RL's `max_trajectory_age_steps`). With
one update a step it is the age in updates, which M2PO counts. Those systems bound the age; here every batch has age k,
their worst case, but for the first k steps, which the start samples.

A method sees what it sees there. `rollout_logp` is of the old sampler in its format (the behaviour policy). `old_logp`
is computed again by the trainer with its weights before the first update on the batch (the proximal policy), so the
clip acts on current / old, and a correction on old / rollout, age and format together: the decoupled objective of
Hilton et al. (arXiv 2110.00641), which AReaL uses (arXiv 2505.24298). `algo.mode=bypass_ppo` is PPO without a proximal
policy, AReaL's baseline.

A version is pushed as it would have been at its own step: through every part with the adapters and scales of that step.
Responses whose tokens come from several versions: `harness.run.partial`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Rollout, Sequences, Step, TokenBatch, WeightStream
from harness.config.compose import Composed
from harness.objective.mismatch import PROFILE_EVERY, staleness_metrics
from harness.run.run import Run, Version


def keep(run: Run, step: Step) -> None:
    """Keep the trainer's weights before a step, and forget those that no step will sample from."""
    age = run.config.algo.staleness
    if age:
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in run.trainer.weights()}
        now = Version(step=step.index, weights=weights, fixed=dict(run.composed.fixed))
        run.past = [*run.past[-age:], now]


def synced(run: Run, step: Step, composed: Composed | None = None) -> WeightStream:
    """Weights for a rollout engine, through every part: the trainer's own, or for the rollouts of a run with
    `algo.staleness` the oldest that are kept. `composed`: the method under another plan than the run's."""
    composed = composed or run.composed
    if not run.past or step.purpose != "rollout":
        return composed.sync(run.trainer.weights(), step)
    old, device = run.past[0], run.trainer.parameters[0].device
    weights = ((name, tensor.to(device)) for name, tensor in old.weights.items())
    return replace(composed, fixed=old.fixed).sync(weights, replace(step, index=old.step))


def versions(run: Run, rollout: Rollout, step: Step) -> Tensor:
    """[B, T] int64: the step whose weights sampled each token (`TokenBatch.version`)."""
    if rollout.version is not None:
        return rollout.version.to(run.trainer.parameters[0].device)
    sampled_at = run.past[0].step if run.past else step.index
    return torch.full(rollout.token_ids.shape, sampled_at, device=run.trainer.parameters[0].device)


def stale_logp(run: Run, seqs: Sequences, step: Step) -> Tensor | None:
    """[B, T] float32 nats of the weights that sampled, by the trainer's own forward pass; None without staleness, and
    where the step logs no profiles: it costs a pass over the batch."""
    if not run.past or step.index % PROFILE_EVERY:
        return None
    with run.trainer.holding(run.past[0].weights):
        return run.trainer.score(seqs).logp


def measured(run: Run, batch: TokenBatch, stale: Tensor | None) -> dict[str, float]:
    """Columns `staleness/*` of a step's row; none without staleness."""
    if not run.past:
        return {}
    row = {"staleness/steps": float(batch.step.index - run.past[0].step)}
    return row if stale is None else row | staleness_metrics(batch, stale)
