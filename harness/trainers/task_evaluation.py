"""Evaluations on tasks of their own: k sampled answers a question, a greedy one, and their matrices.

An evaluation that fails leaves a record that says why, never a run that failed: an evaluation decides nothing about the
weights. Left out: which engine answers, and what it holds (`harness.run.loop`, `lowbit eval`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.api import Rollout, RolloutEngine
from harness.config.schema import EvaluationConfig
from harness.foundation.provenance import text_hash
from harness.foundation.seeds import stable_seed
from harness.records.run_result import TaskEvalRecord
from harness.records.sample_scores import classes_of, scores_of
from harness.tasks import Item, Score, Task, failure_shares
from harness.trainers.engine_logp import check_answers
from harness.trainers.evaluation import Site
from harness.trainers.stopping import stopped

FAILURES = (RuntimeError, ValueError, OSError, MemoryError)
"""Failures that an evaluation may have: memory, requests that do not fit, a lost worker, answers without log-probs."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One entry of `evaluations`, ready to be asked."""

    number: int
    """Place in the list, from 0 on."""
    entry: EvaluationConfig
    task: Task
    items: tuple[Item, ...]

    @property
    def max_new_tokens(self) -> int:
        """Longest answer in tokens."""
        return self.entry.max_new_tokens or self.task.max_new_tokens


def asked(entries: Sequence[EvaluationConfig], tasks: Sequence[Task]) -> list[Asked]:
    """The entries with the first `num` held-out questions of their tasks."""
    found: list[Asked] = []
    for number, (entry, task) in enumerate(zip(entries, tasks, strict=True)):
        sizes = [size for size in (entry.num, task.num_eval) if size is not None]
        found.append(Asked(number=number, entry=entry, task=task, items=tuple(task.sample("eval", range(min(sizes))))))
    return found


def task_evaluation(engine: RolloutEngine, one: Asked, *, site: Site, precision: str, step: int) -> TaskEvalRecord:
    """Ask an engine that holds the policy after `step` steps, or record why it could not answer."""
    entry, started = one.entry, time.perf_counter()
    told: dict[str, Any] = {
        "number": one.number, "task": one.task.name, "step": step, "site": site, "precision": precision,
        "engine": type(engine).__name__, "k": entry.k, "temperature": entry.temperature, "top_p": entry.top_p,
        "max_new_tokens": one.max_new_tokens, "question_hash": text_hash(item.key for item in one.items),
    }  # fmt: skip
    try:
        told |= _answers(engine, one)
    except FAILURES as failure:
        told["error"] = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    return TaskEvalRecord.model_validate(told | {"seconds": time.perf_counter() - started})


def _answers(engine: RolloutEngine, one: Asked) -> dict[str, Any]:
    """Matrices and shares of the answers that an engine gives."""
    entry, told = one.entry, dict[str, Any]()
    rollouts: list[Rollout] = []
    every: list[Score] = []
    if entry.k:
        rollout, scores = _ask(engine, one, entry.k, entry.temperature, entry.top_p)
        rows = [scores[i : i + entry.k] for i in range(0, len(scores), entry.k)]
        told["correct"] = [[int(score.reward >= 1.0) for score in row] for row in rows]
        if any(score.answer is not None for score in scores):
            told["answers"] = [classes_of([score.answer for score in row]) for row in rows]
        rollouts, every = [rollout], scores
    if entry.greedy:
        rollout, scores = _ask(engine, one, 1, 0.0, 1.0)
        told["greedy"] = [int(score.reward >= 1.0) for score in scores]
        rollouts, every = rollouts or [rollout], every or scores
    (rollout,) = rollouts  # lengths and shares are those of the sampled answers, where there are any
    return told | {
        "scores": scores_of(told), "length_mean": float(rollout.lengths.float().mean()),
        "truncated_frac": float(rollout.truncated.float().mean()),
        "unparsable_frac": sum(not score.is_parsable for score in every) / len(every),
        "failures": failure_shares(every),
    }  # fmt: skip


def _ask(engine: RolloutEngine, one: Asked, k: int, temperature: float, top_p: float) -> tuple[Rollout, list[Score]]:
    """(answers, their scores) of every question k times, adjacent."""
    rollout = engine.generate(
        [item.prompt for item in one.items], num_samples=k, max_new_tokens=one.max_new_tokens,
        temperature=temperature, seed=stable_seed("eval"), top_p=top_p,
    )  # fmt: skip
    check_answers(rollout)
    rollout = stopped(rollout, one.task)
    return rollout, one.task.score([item for item in one.items for _ in range(k)], rollout.responses())
