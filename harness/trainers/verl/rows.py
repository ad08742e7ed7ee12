"""verl's metrics and answers as our rows and evaluation records. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.foundation.clock import STAGES
from harness.records.run_result import EvalRecord
from harness.tasks import Item, Score, failure_shares
from harness.trainers.corrected_step import update_metrics
from harness.trainers.evaluation import eval_record
from harness.trainers.local.trainer import Diverged
from harness.trainers.verl.job import VerlJob

TIMERS = {"gen": "generate", "reward": "reward", "update_weights": "sync", "old_log_prob": "old_logp",
          "update_actor": "update"}  # fmt: skip
"""verl's name of a stage -> ours. Rewards are earned while other answers are still sampled: they are in `gen`."""
PREFIX = "actor/lowbit_"
MEMORY = {
    "memory/update_gib": "actor/perf/max_memory_allocated_gb",
    "memory/reserved_gib": "actor/perf/max_memory_reserved_gb",
    "memory/host_gib": "actor/perf/cpu_memory_used_gb",
}
"""Our name -> verl's: peaks of the trainer's process on its GPU since its start, and what all processes of the first
trainer's machine have of its memory after an update."""
FACTS = ("acc", "is_parsable", "length", "truncated", "failure", "lost")
"""Facts that `agent.py` reports of every answer: numbers, and the name of its first mistake or None. `lost`: tokens
whose log-prob is NaN."""


Update = tuple[dict[str, float], dict[str, float]]
"""Metrics of one update, and its sums over tokens."""


def update_row(metrics: Mapping[str, Any]) -> Update:
    """One update of verl's actor. `metrics`: verl's, our sums among them."""
    sums = {name.removeprefix(PREFIX): float(value) for name, value in metrics.items() if name.startswith(PREFIX)}
    row = {"train/loss": sums.pop("loss"), "train/grad_norm": float(metrics["actor/grad_norm"])}
    row["train/loss_scale"] = sums.pop("loss_scale")
    row["train/skipped"] = float(not math.isfinite(row["train/grad_norm"]))  # else `check_finite` ends the run
    return row, sums


def step_row(
    measured: Mapping[str, Any], updates: Sequence[Update], metrics: Mapping[str, Any], timers: Mapping[str, float]
) -> dict[str, Any]:
    """One line of the series. `metrics`: verl's of the step; `timers`: seconds."""
    seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    for name, stage in TIMERS.items():
        seconds[stage] += float(timers.get(name, 0.0))
    seconds["other"] = max(0.0, float(timers["step"]) - sum(seconds.values()))
    row = {**measured, **update_metrics(updates), "train/lr": float(metrics["actor/lr"])}
    row |= {f"time/{stage}_s": value for stage, value in seconds.items()}
    for name, metric in MEMORY.items():
        if (gib := float(metrics.get(metric, 0.0))) > 0:  # a CPU's is not counted
            row[name] = gib
    return row | {"rollout/tokens_per_s": row["rollout/tokens"] / max(seconds["generate"], 1e-9)}


def check_finite(row: Mapping[str, Any], step: int, *, is_scaled: bool = False) -> None:
    """Raises Diverged where the update was no update: verl itself would go on. `is_scaled`: FP16's loss scaling may
    skip a step for its gradients."""
    names = ("train/loss",) if is_scaled else ("train/loss", "train/grad_norm")
    for name in names:
        if not math.isfinite(row[name]):
            raise Diverged(f"step {step}: {name} is {row[name]}")


def one_passport(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The passport that all replicas share, as each read it back. Raises RuntimeError, naming the first difference:
    every replica must sample from the same codes and scales.

    Switches and scales of the engines (`state`) may differ: their first digits are those of each GPU's own sums.
    """
    first = dict(found[0])
    for number, other in enumerate(found[1:], start=1):
        for own, theirs in zip(first["weights"], other["weights"], strict=True):
            if own != theirs:
                raise RuntimeError(f"replica {number} has other weights than replica 0: {theirs} in place of {own}")
        for name in first.keys() - {"weights", "state"}:
            if first[name] != other[name]:
                raise RuntimeError(f"replica {number}: {name} is {other[name]}, on replica 0 {first[name]}")
    return first


def evaluation(job: VerlJob, questions: Sequence[Item], facts: Mapping[str, Sequence[Any]], step: int) -> EvalRecord:
    """One pass over the held-out questions, in their order. Raises RuntimeError where one has no answer, and where
    answers have no log-probs."""
    answers = {int(index): i for i, index in enumerate(facts["index"])}
    if missing := [item.index for item in questions if item.index not in answers]:
        raise RuntimeError(f"evaluation at step {step}: question {missing[0]} got no answer ({len(missing)} of them)")
    found = {name: [facts[name][answers[item.index]] for item in questions] for name in FACTS}
    if lost := sum(found["lost"]):
        raise RuntimeError(f"the engine's log-probs of {lost:.0f} of {sum(found['length']):.0f} tokens are NaN")
    told = zip(found["acc"], found["is_parsable"], found["failure"], strict=True)
    scores = [Score(reward, parsable != 0, failure) for reward, parsable, failure in told]
    return eval_record(
        job.config, "rollout", step, questions,
        rewards=[score.reward for score in scores],
        is_parsable=[score.is_parsable for score in scores],
        length_mean=sum(found["length"]) / len(questions),
        truncated_frac=sum(found["truncated"]) / len(questions),
        failures=failure_shares(scores),
    )  # fmt: skip
