"""Several samplers of one batch: a plan's own engine and others beside it, each with its share of every prompt.

    push      the weights go through every part under each sampler's own plan, and every passport is checked
    generate  `harness.run.collect.generate`: responses by shares; the batch says which sampler drew which
    passport  the plan's own, the others under `state`

So a batch can explore in 4 bits beside responses of the deployed format. Left out: vLLM and verl, whose one engine
holds the GPU; samplers of other weights or temperatures.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from harness.api import Passport, RolloutEngine, Step, TokenBatch, sample_counts
from harness.config.compose import Composed, check_passport
from harness.objective.mismatch import METRIC_CAP, mismatch_metrics
from harness.run.run import Run
from harness.run.staleness import synced
from harness.trainers.corrected_step import NUM_AFTER_SYNC

SHOWN = ("kl_k3", "ess_token_raw")
"""Mismatch that is logged sampler by sampler."""


def push(run: Run, engine: RolloutEngine, step: Step, composed: Composed) -> Passport:
    """Push the weights of a step into one engine, through every part of `composed`. Returns the engine's passport.

    Raises RuntimeError where that is not what `composed` plans.
    """
    engine.load_weights(synced(run, step, composed))
    composed.after_sync(engine, [item.prompt for item in run.eval_items[:NUM_AFTER_SYNC]])
    passport = engine.realized_plan()
    check_passport(composed.plan, passport)
    return passport


def push_others(run: Run, step: Step, own: Passport) -> Passport:
    """Push the weights of a step to the samplers beside the plan's own. Returns its passport `own` with theirs in
    `state`. What parts remember is what they did for the plan's own sampler."""
    if not run.others:
        return own
    counts = sample_counts(run.composed.plan, run.config.algo.group_size)
    told: list[dict[str, object]] = []
    for other, count in zip(run.others, counts[1:], strict=True):
        composed = replace(run.composed, plan=other.plan, memory=[dict(memory) for memory in run.composed.memory])
        told.append({"name": other.name, "samples": count, **asdict(push(run, other.engine, step, composed))})
    return replace(own, state={**own.state, "samples": counts[0], "samplers": told})


def by_sampler(run: Run, batch: TokenBatch) -> dict[str, float]:
    """Columns `sampler/<name>/*` of a step's row: mismatch and mean raw reward of each sampler; none where there is
    one."""
    if batch.sampler is None or batch.reward is None:
        return {}
    found: dict[str, float] = {}
    for number, name in enumerate([run.config.precision.name, *(other.name for other in run.others)]):
        rows = batch.sampler == number
        metrics = mismatch_metrics(batch.old_logp[rows], batch.rollout_logp[rows], batch.mask[rows], cap=METRIC_CAP)
        found |= {f"sampler/{name}/{metric}": metrics[f"mismatch/{metric}"] for metric in SHOWN}
        found[f"sampler/{name}/reward"] = float(batch.reward[rows].mean()) if bool(rows.any()) else torch.nan
    return found
