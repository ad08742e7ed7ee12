"""The update recipe of a rollout batch, one for both trainers and the replay laboratory.

    batch_correction    once per batch, before any update: weights, masks and clips of the method's parts
    update_correction   once per update: parts that see the current policy, and the bypass modes
    update_lr_factor    once per update: the method's factor on the learning rate
    method_loss         one micro-batch's loss, with the method's own objective where it has one
    update_metrics      means over the updates of a batch
    minibatches         the rows of every update; `take_batch`, `take_correction`: what is theirs

Left out: forward passes, micro-batches and optimizer steps, which are each trainer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.api import Correction, Step, TokenBatch
from harness.config.compose import Composed, has_hook
from harness.config.schema import AlgoConfig
from harness.foundation.seeds import generator
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
    return normalized(composed.correct(c, batch), batch, algo.batch_normalize)


def needs_current_policy(composed: Composed, algo: AlgoConfig) -> bool:
    """Does a hook of an update read the log-probs of the current policy, so that they are needed first?"""
    hooks = ("correct_update",)
    if algo.mode != "decoupled":
        hooks = ("correct", "correct_update", "update_lr_factor")
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
        c = normalized(c, current, algo.batch_normalize)
    return composed.correct_update(c, logp, batch)


def update_lr_factor(composed: Composed, batch: TokenBatch, logp: Tensor | None, algo: AlgoConfig) -> float | None:
    """The method's factor on the learning rate of one update of these rows; None where no part has one.

    `logp` [b, T] nats: the current policy's, detached; the bypass modes need it.
    """
    if not any(has_hook(part, "update_lr_factor") for part in composed.parts):
        return None
    if algo.mode != "decoupled":
        assert logp is not None
        batch = replace(batch, old_logp=logp)
    return composed.update_lr_factor(batch)


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


def take_batch(b: TokenBatch, rows: Tensor) -> TokenBatch:
    """Some rows of a batch."""
    fields = {name: getattr(b, name)[rows] for name in ("token_ids", "mask", "adv", "rollout_logp", "old_logp")}
    named = {name: getattr(b, name) for name in ("group", "reward", "sampler", "version")}
    fields |= {name: values[rows] for name, values in named.items() if values is not None}
    dicts = {name: {k: v[rows] for k, v in getattr(b, name).items()} for name in ("shadow", "extras")}
    return replace(b, **fields, **dicts)


def take_correction(c: Correction, rows: Tensor) -> Correction:
    """Some rows of a correction."""
    return Correction(
        weight=c.weight[rows], keep=c.keep[rows], clip_low=c.clip_low[rows], clip_high=c.clip_high[rows],
        adv_shift=None if c.adv_shift is None else c.adv_shift[rows],
    )  # fmt: skip


def minibatches(algo: AlgoConfig, step: Step) -> list[Tensor]:
    """Row indices of every update, in order; the samples of one prompt stay together."""
    if algo.num_minibatches == 1:
        return [torch.arange(algo.num_prompts * algo.group_size)] * algo.num_epochs
    members = torch.arange(algo.group_size)
    batches: list[Tensor] = []
    for epoch in range(algo.num_epochs):
        order = torch.randperm(algo.num_prompts, generator=generator("cpu", step.seed, "minibatch", step.index, epoch))
        for prompts in order.tensor_split(algo.num_minibatches):
            batches.append((prompts[:, None] * algo.group_size + members).flatten())
    return batches
