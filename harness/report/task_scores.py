"""Scores of the runs' `evaluations`: one row per arm, task, site and score, over seeds and questions.

Of a finished run its last answers count. Left out: the accuracy on held-out questions of the training task
(`harness.report.leaderboard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.records.arms import arm_labels
from harness.records.run_result import Base, RunResult, TaskEvalRecord
from harness.records.sample_scores import Interval, over_seeds, question_scores
from harness.records.statuses import FINISHED
from harness.report.scores import by_base


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A score of one arm on one of its evaluations."""

    arm: str
    task: str
    site: str
    precision: str
    step: int
    """Steps of the policy that answered."""
    name: str
    """avg@k, pass@1, 2, 4 .. k, maj@k or greedy."""
    seeds: int
    questions: int
    interval: Interval
    """95 %, over seeds (over bases, where these have several runs) and questions."""


def last_answers(run: RunResult) -> list[TaskEvalRecord]:
    """The last answers of a run to each of its evaluations at each site, in the order of its configuration; those that
    ended in an error are left out."""
    last: dict[tuple[int, str], TaskEvalRecord] = {}
    for record in sorted(run.evaluations, key=lambda one: one.step):
        if record.error is None:
            last[record.number, record.site] = record
    return [last[key] for key in sorted(last)]


def task_scores(results: Sequence[RunResult]) -> list[TaskScore]:
    """Every score of every arm over its finished runs, arms in the order of `results`. Seeds that were asked other
    questions, or after another number of steps, have a row of their own."""
    labels = arm_labels(results)
    groups: dict[tuple[str, int, str, int, str], list[tuple[Base, TaskEvalRecord]]] = {}
    for run in (run for run in results if run.status in FINISHED):
        for record in last_answers(run):
            key = (labels[run.run_id], record.number, record.site, record.step, record.question_hash)
            groups.setdefault(key, []).append((run.base, record))
    rows: list[TaskScore] = []
    for (arm, _, site, step, _), records in groups.items():
        first = records[0][1]
        scores = [(base, question_scores(record.model_dump())) for base, record in records]
        for name in scores[0][1]:
            values = np.stack([of_run[name] for _, of_run in scores if name in of_run])
            units = by_base(values, [base for base, of_run in scores if name in of_run])
            rows.append(TaskScore(
                arm=arm, task=first.task, site=site, precision=first.precision, step=step, name=name,
                seeds=len(values), questions=values.shape[1], interval=over_seeds(units),
            ))  # fmt: skip
    return rows


HEAD = ("arm", "task", "site", "precision", "steps", "score", "seeds", "questions", "mean and 95 % interval")


def cells(row: TaskScore) -> tuple[str, ...]:
    """A row under `HEAD`, as text."""
    return (
        row.arm, row.task, row.site, row.precision, str(row.step), row.name, str(row.seeds), str(row.questions),
        str(row.interval),
    )  # fmt: skip
