"""The update recipe of a rollout batch, one for both trainers and the replay laboratory.

    batch_correction    once per batch, before any update: weights, masks and clips of the method's parts
    update_correction   once per update: parts that see the current policy, and the bypass modes
    method_loss         one micro-batch's loss, with the method's own objective where it has one
    update_metrics      means over the updates of a batch

Left out: forward passes, micro-batches and optimizer steps, which are each trainer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from harness.api import Correction, TokenBatch
from harness.config.compose import Composed, has_hook
from harness.config.schema import AlgoConfig
from harness.objective.loss import Totals, normalized, part_loss, policy_loss, start
from harness.objective.mismatch import clip_metrics

NUM_AFTER_SYNC = 32
"""Prompts that `Part.after_sync` may calibrate on: held-out ones, the same at every push."""


def batch_correction(composed: Composed, batch: TokenBatch, algo: AlgoConfig) -> Correction:
    """The correction of a whole batch before any update, [B, T] constants.

    In the bypass modes there is no policy before the update, so nothing is corrected yet.
    """
    c = start(batch, algo.eps_low, algo.eps_high)
    if algo.mode != "decoupled":
        return c
    return normalized(composed.correct(c, batch), batch.mask, algo.batch_normalize)


def needs_current_policy(composed: Composed, algo: AlgoConfig) -> bool:
    """Does `update_correction` change anything, so that the log-probs of the current policy are needed first?"""
    hooks = ("correct_update",) if algo.mode == "decoupled" else ("correct", "correct_update")
    return any(has_hook(part, hook) for part in composed.parts for hook in hooks)


def update_correction(
    composed: Composed, c: Correction, batch: TokenBatch, logp: Tensor, algo: AlgoConfig
) -> Correction:
    """The correction of one update's rows. `logp` [b, T] nats: the current policy's, detached.

    In the bypass modes the rules see the current policy as the old one, as a constant (losses.md section 5).
    """
    if algo.mode != "decoupled":
        current = replace(batch, old_logp=logp)
        c = composed.correct(start(current, algo.eps_low, algo.eps_high), current)
        c = normalized(c, batch.mask, algo.batch_normalize)
    return composed.correct_update(c, logp, batch)


def method_loss(
    composed: Composed, logp: Tensor, batch: TokenBatch, c: Correction, totals: Totals, algo: AlgoConfig,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(loss, sums over tokens) of a micro-batch, as `policy_loss`; a part with an objective of its own replaces it.

    logp [b, T] nats with gradient. In mode bypass_ppo the ratio is that of the current policy to the sampler.
    """
    if algo.mode == "bypass_ppo":
        batch = replace(batch, old_logp=batch.rollout_logp)
    own = composed.token_loss()
    return policy_loss(
        logp, batch, c, totals, algo, part_loss=None if own is None else part_loss(own, logp, batch, c),
        owns_objective=own is not None and own.owns_objective, entropy=entropy,
    )  # fmt: skip


def update_metrics(updates: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Means over the updates of one batch, and clip fractions over all their tokens.

    An update is (its metrics, its sums over tokens).
    """
    rows, sums = [row for row, _ in updates], [sums for _, sums in updates]
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    means = {name: sum(row[name] for row in rows) / len(rows) for name in shared}
    return means | clip_metrics({name: sum(s[name] for s in sums) for name in sums[0]})
