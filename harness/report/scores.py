"""Scores of an arm's runs: what every run scored in the reference precision, in its own format and while training.

A diverged run scores 0 wherever it did not arrive, so an arm cannot gain by losing its bad seeds. Left out: verdicts,
which are the leaderboard's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.records import stats
from harness.records.arms import Arm, group_arms, scored
from harness.records.run_result import Base, EvalRecord, RunResult, accuracies
from harness.records.sweep_file import ENDPOINTS

SCORES = ("accuracy", "rollout_accuracy", "reward", "auc", "deployed_auc")
SITES = {"reference": "reference", "deployed": "rollout"}
"""Endpoint -> the evaluations that it is made of."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of the runs of an arm; rows are the scored runs in seed order. Fractions in [0, 1]."""

    matrices: dict[str, stats.Floats]
    """Score name -> [S, Q]; Q = 1 where a score has no value per question, or the runs saw different questions."""
    bases: dict[str, list[Base]]
    """Score name -> bases of its rows."""
    auc: dict[stats.Key, float]
    """Key of `by_pair` -> AUC."""
    answers: dict[stats.Key, stats.Floats]
    """Key of `by_pair` -> [E evaluations after step 0, Q] of 0 and 1."""
    outcomes: Mapping[str, stats.Outcomes]
    """Endpoint -> key of `by_pair` -> what became of the run there."""
    base_accuracy: float
    """At the start: the mean over bases, as the means of the matrices are; NaN where no run was evaluated there."""

    def mean(self, endpoint: str) -> float:
        """Mean of an endpoint over all runs, collapsed ones too; 0 where there is none."""
        values = [run.value for run in self.outcomes[endpoint].values()]
        return sum(values) / max(len(values), 1)


def score_arms(results: Sequence[RunResult]) -> tuple[list[Arm], dict[str, Scores]]:
    """The arms of `group_arms`, and the scores of each by its label."""
    arms = group_arms(results)
    return arms, {arm.label: score_arm(arm) for arm in arms}


def score_arm(arm: Arm) -> Scores:
    """Every score of the scored runs of an arm."""
    runs = scored(arm)
    rows: dict[str, list[stats.Floats]] = {name: [] for name in SCORES}
    bases: dict[str, list[Base]] = {name: [] for name in SCORES}
    auc: dict[stats.Key, float] = {}
    outcomes: dict[str, dict[stats.Key, stats.Outcome]] = {name: {} for name in ENDPOINTS}
    answered: dict[stats.Key, stats.Floats] = {}
    for key, run in by_pair(runs).items():
        reference, rollout = answers(run, "reference"), answers(run, "rollout")
        found = {
            "accuracy": reference[-1:],
            "auc": reference,
            "rollout_accuracy": rollout[-1:],
            "deployed_auc": rollout,
        }
        if len(reference):
            auc[key] = float(reference.mean())
            answered[key] = reference
        for endpoint, curve in (("reference", reference), ("deployed", rollout)):
            if len(curve):
                outcomes[endpoint][key] = _outcome(run, SITES[endpoint], curve)
        reward = 0.0 if run.status == "diverged" else run.summary.get("reward_last")
        if reward is not None:
            found["reward"] = np.array([[reward]])
        for name, curve in found.items():
            if len(curve):
                rows[name].append(curve.mean(axis=0))
                bases[name].append(run.base)
    is_crossed = len({_hash(run) for run in runs}) == 1
    starts: dict[Base, list[float]] = {}
    for run in runs:
        starts.setdefault(run.base, []).extend(value for step, value in accuracies(run.evals, "reference") if not step)
    return Scores(
        matrices={name: _matrix(values, is_crossed) for name, values in rows.items()},
        bases=bases,
        auc=auc,
        answers=answered,
        outcomes=outcomes,
        base_accuracy=_mean([_mean(values) for values in starts.values() if values]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _outcome(run: RunResult, site: str, curve: stats.Floats) -> stats.Outcome:
    start = _start(run, site)
    return stats.outcome(
        [float(value) for value in curve.mean(axis=1)], math.nan if start is None else float(np.mean(start)),
        run.status == "diverged", is_frozen=not has_moved(run, site),
    )  # fmt: skip


def has_moved(run: RunResult, site: str) -> bool:
    """Did an evaluation after the start differ in any answer? True where nothing was evaluated at the start."""
    start, curve = _start(run, site), answers(run, site)
    return start is None or len(start) != curve.shape[1] or bool((curve != np.array(start)).any())


def _start(run: RunResult, site: str) -> list[float] | None:
    return next((_answers(record) for record in _of(run, site) if record.step == 0), None)


def _matrix(rows: list[stats.Floats], is_crossed: bool) -> stats.Floats:
    if is_crossed and len({len(row) for row in rows}) == 1:
        return np.array(rows)
    return np.array([[row.mean()] for row in rows]).reshape(len(rows), 1)


def evaluation_steps(run: RunResult) -> list[int]:
    """The steps after 0 at which a run is evaluated, by its config, or by its own evaluations where that is silent."""
    trainer = run.config.get("trainer", {})
    steps, every = trainer.get("steps"), trainer.get("eval_every")
    if not steps or not every:
        return sorted({record.step for record in run.evals if record.step > 0})
    return [*range(every, steps, every), steps]


def answered_steps(run: RunResult, site: str) -> list[int]:
    """The steps of `answers`: of a diverged run all at which it was to be evaluated, else those at which it was."""
    found = sorted({record.step for record in _of(run, site) if record.step > 0})
    return evaluation_steps(run) if run.status == "diverged" else found


def answers(run: RunResult, site: str) -> stats.Floats:
    """[E evaluations after step 0, Q questions] of 0 and 1; 0 where a diverged run did not arrive."""
    records, steps = {record.step: record for record in _of(run, site)}, answered_steps(run, site)
    width = max((len(_answers(record)) for record in _of(run, site)), default=1)
    missing = [0.0] * width
    return np.array([_answers(records[step]) if step in records else missing for step in steps]).reshape(-1, width)


def _answers(record: EvalRecord) -> list[float]:
    return [float(value) for value in record.correct] or [math.nan if record.accuracy is None else record.accuracy]


def _of(run: RunResult, site: str) -> list[EvalRecord]:
    return [record for record in run.evals if record.site == site]


def components(scores: Mapping[str, Scores], endpoint: str = "reference") -> stats.Components:
    """Variance components of a context's scores, over the arms of which no run collapsed or stayed frozen."""
    steady = [
        (name, found)
        for name, found in scores.items()
        if len(found.outcomes[endpoint]) > 1
        and all(run.has_moved and not run.has_collapsed for run in found.outcomes[endpoint].values())
    ]
    values = {name: {key: run.value for key, run in found.outcomes[endpoint].items()} for name, found in steady}
    matrix = {"reference": "auc", "deployed": "deployed_auc"}[endpoint]
    return stats.components(values, {name: found.matrices[matrix] for name, found in steady})


def by_base(rows: stats.Floats, bases: Sequence[Hashable]) -> stats.Floats:
    """[S runs, ...] -> [U units, ...]: the mean of the runs of each base, which rise and fall together. Runs of one
    base alone, and bases with a run each, are units themselves."""
    distinct = list(dict.fromkeys(bases))
    if len(distinct) in (1, len(bases)):
        return rows
    return np.array([rows[[other == base for other in bases]].mean(axis=0) for base in distinct])


def on_common_bases(own: Scores, other: Scores) -> stats.Stratum:
    """AUCs of the runs of an arm and its control on the bases (and questions) that both have."""
    common = {base for base, _ in own.auc} & {base for base, _ in other.auc}
    arm, control = (np.array([v for (base, _), v in one.auc.items() if base in common]) for one in (own, other))
    return stats.Stratum(arm, control, len(common))


def by_pair(runs: Sequence[RunResult]) -> dict[stats.Key, RunResult]:
    """((base, questions), run seed) -> run of an arm: what runs share that are compared as a pair, here answer by
    answer. A second run there, on another device, is another run of the arm: its device stands beside its seed."""
    first: dict[stats.Key, RunResult] = {}
    for run in sorted(runs, key=_device):
        first.setdefault(_pair(run), run)
    keys = [pair if first[pair := _pair(run)] is run else (pair[0], (run.seed, _device(run))) for run in runs]
    return dict(zip(keys, runs, strict=True))


def _pair(run: RunResult) -> stats.Key:
    return (run.base, _hash(run)), run.seed


def _device(run: RunResult) -> str:
    return run.config.get("trainer", {}).get("device", "")


def _hash(run: RunResult) -> str:
    return next((record.question_hash for record in _of(run, "reference")), "")
