"""The rule of stale rollouts (`algo.staleness`), for every trainer: whose weights sample a step, and what it measures.

    step t: the sampler holds weights max(0, t - k) -> responses -> updates -> weights t + 1

k counts steps, one rollout batch with all its updates, as asynchronous systems do: a version of the weights is what a
step leaves (AReaL's `max_head_offpolicyness`, prime-rl's async level, NeMo-RL's `max_trajectory_age_steps`). With
one update a step it is the age in updates, which M2PO counts. Those systems bound the age; here every batch has age k,
their worst case, but for the first k steps, which the start samples.

A method sees what it sees there. `rollout_logp` is of the old sampler in its format (the behaviour policy). `old_logp`
is computed again by the trainer with its weights before the first update on the batch (the proximal policy), so the
clip acts on current / old, and a correction on old / rollout, age and format together: the decoupled objective of
Hilton et al. (arXiv 2110.00641), which AReaL uses (arXiv 2505.24298). `algo.mode=bypass_ppo` is PPO without a proximal
policy, AReaL's baseline.

Left out: where versions are kept (`harness.run.staleness`, `harness.trainers.verl.past`), responses whose tokens come
from several versions, and ages that vary within a batch.
"""

from __future__ import annotations

from torch import Tensor

from harness.api import Step, TokenBatch
from harness.objective.mismatch import PROFILE_EVERY, staleness_metrics


def sampled_by(step: int, age: int) -> int:
    """Number of steps behind the weights that sample a step, in a run with `algo.staleness=age`."""
    return max(0, step - age)


def is_scored(step: Step) -> bool:
    """Does the trainer also score this step's batch with the weights that sampled it? It costs a pass."""
    return step.index % PROFILE_EVERY == 0


def measured(batch: TokenBatch, age: int, stale: Tensor | None) -> dict[str, float]:
    """Columns `staleness/*` of a step's row; none without staleness. `stale` [B, T] float32 nats: the weights that
    sampled, by the trainer's own forward pass, where the batch was scored with them."""
    if not age:
        return {}
    row = {"staleness/steps": float(batch.step.index - sampled_by(batch.step.index, age))}
    return row if stale is None else row | staleness_metrics(batch, stale)
