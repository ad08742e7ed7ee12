"""Evaluation on fixed held-out questions: the one record of it, whoever samples the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from harness.api import RolloutEngine
from harness.config.schema import RunConfig
from harness.foundation.provenance import text_hash
from harness.foundation.seeds import stable_seed
from harness.records.run_result import EvalRecord
from harness.tasks import Item, Task, failure_shares
from harness.trainers.engine_logp import check_answers
from harness.trainers.local.trainer import Diverged
from harness.trainers.stopping import stopped

REFERENCE = "fp32"
"""The precision in which runs are compared."""
Site = Literal["reference", "rollout"]


def evaluation(
    engine: RolloutEngine, site: Site, *, config: RunConfig, task: Task, items: Sequence[Item], max_new_tokens: int,
    step: int,
) -> EvalRecord:  # fmt: skip
    """One sampled answer per held-out question by an engine that holds the policy after `step` steps.

    Raises Diverged where the policy itself, in the reference precision, has a log-prob that is not finite, and
    RuntimeError where its rollout engine has none.
    """
    rollout = engine.generate(
        [item.prompt for item in items],
        num_samples=1,
        max_new_tokens=max_new_tokens,
        temperature=config.engine.temperature,
        seed=stable_seed("eval"),
    )
    if site == "reference" and not torch.isfinite(rollout.logp).all():
        raise Diverged("a log-probability of the policy is not finite")
    check_answers(rollout)
    rollout = stopped(rollout, task)
    scores = task.score(items, rollout.responses())
    return eval_record(
        config, site, step, items,
        rewards=[score.reward for score in scores],
        is_parsable=[score.is_parsable for score in scores],
        length_mean=float(rollout.lengths.float().mean()),
        truncated_frac=float(rollout.truncated.float().mean()),
        failures=failure_shares(scores),
    )  # fmt: skip


def eval_record(
    config: RunConfig, site: Site, step: int, items: Sequence[Item], *, rewards: Sequence[float],
    is_parsable: Sequence[bool], length_mean: float, truncated_frac: float,
    failures: Mapping[str, float] | None = None,
) -> EvalRecord:  # fmt: skip
    """The record of one answer per item: rewards and readability in the order of `items`, lengths in tokens, shares of
    the task's kinds of failure."""
    return EvalRecord.model_validate(
        {
            "step": step,
            "precision": REFERENCE if site == "reference" else config.precision.name,
            "site": site,
            "accuracy": sum(rewards) / len(rewards),
            "correct": [int(reward >= 1.0) for reward in rewards],
            "question_hash": text_hash(item.key for item in items),
            "length_mean": length_mean,
            "truncated_frac": truncated_frac,
            "unparsable_frac": sum(not parsable for parsable in is_parsable) / len(rewards),
            "failures": dict(failures or {}),
        }
    )
