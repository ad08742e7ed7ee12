"""One trial: its seeds one after another, and whether it is worth the next one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.records.paths import runs_folder
from harness.records.run_result import RunResult, read_series
from harness.studies.search.cells import Runner, run_one
from harness.studies.search.pruning import (
    HALF,
    Scores,
    has_collapsed,
    is_among_lowest,
    is_beaten,
    is_below_half,
    reward_at,
    scaled,
)
from harness.studies.search.space import cell_of, overrides_of
from harness.studies.search.spec import Objective, Search

REWARD_HALF = "reward_half"
"""Score that rule 3 of `harness.studies.search.pruning` compares."""


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """Outcome of a trial."""

    state: Literal["complete", "pruned", "failed"]
    reason: str = ""
    scores: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Seed -> metric -> value; only complete trials have every seed."""
    cells: dict[int, str] = field(default_factory=dict[int, str])
    """Seed -> run id, in the order they ran."""
    cost_s: float = 0.0
    """Core-seconds of its cells, also of those that were there before: budgets are equal in what was spent on them."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Surroundings that a trial needs to run."""

    search: Search
    launch: Launch
    runner: Runner
    stop: threading.Event


def metrics_of(search: Search) -> list[str]:
    """Every metric that objectives and constraint name."""
    names = [o.metric for o in search.objectives] + ([search.constraint.metric] if search.constraint else [])
    return list(dict.fromkeys(names))


def measured(result: RunResult, metric: str) -> float | None:
    """A metric of a record."""
    return result.time_s.get("total") if metric == "time_s" else result.summary.get(metric)


def aggregate(scores: Scores, objective: Objective) -> float:
    """The value of a trial: the mean over seeds, geometric where logarithms are compared, rounded to the resolution."""
    mean = fmean(scaled(of_seed[objective.metric], objective.log) for of_seed in scores.values())
    value = math.exp(mean) if objective.log else mean
    return value if not objective.resolution else round(value / objective.resolution) * objective.resolution


def violation(scores: Scores, search: Search) -> float | None:
    """By how much the mean over the seeds so far exceeds the constraint (feasible up to 0); None where not measured."""
    constraint = search.constraint
    if constraint is None:
        return None
    values = [of_seed[constraint.metric] for of_seed in scores.values() if constraint.metric in of_seed]
    return fmean(values) - constraint.at_most if values else None


def evaluate(
    around: Surroundings, values: Mapping[str, Any], peers: Callable[[], Sequence[FrozenTrial]]
) -> TrialOutcome:
    """Run the cells of a trial. `peers` reads the trials of its share. Raises Stopped."""
    search, scores, cells, cost = around.search, dict[int, dict[str, float]](), dict[int, str](), 0.0

    def ended(state: Literal["complete", "pruned", "failed"], reason: str = "") -> TrialOutcome:
        return TrialOutcome(state=state, reason=reason, scores=scores, cells=cells, cost_s=cost)

    try:
        first = cell_of(overrides_of(search, values), search.seeds[0])
    except ValueError as error:
        return ended("failed", str(error))
    for seed in search.seeds:
        config = replace(first, seed=seed, base_seed=seed)
        steps, half_rewards = config.trainer.steps, _half_rewards(peers(), seed)

        def verdict(rewards: dict[int, float], steps: int = steps, known: list[float] = half_rewards) -> str | None:
            reason = has_collapsed(rewards, steps, search.pruner)
            return reason or is_among_lowest(rewards, steps, known, search.pruner)

        done = run_one(config, around.launch, around.runner, around.stop, verdict)
        cells[seed] = run_id(config)
        cost += done.seconds
        scores[seed] = _half_reward(around, done.result, done.rewards, steps)
        status, reason = done.result.status, f"seed {seed}: {done.result.reason}"
        if status != "ok":
            return ended("failed" if status == "failed" else "pruned", reason)
        found = {metric: measured(done.result, metric) for metric in metrics_of(search)}
        if missing := [metric for metric, value in found.items() if value is None]:
            return ended("failed", f"seed {seed}: the record has no {missing[0]}")
        scores[seed] |= {metric: value for metric, value in found.items() if value is not None}
        feasible = [scores_of(trial) for trial in peers() if is_feasible(trial)]
        beaten = is_beaten(scores, feasible, search.seeds, search.objectives, search.pruner)
        others = [scores_of(t) for t in peers() if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        beaten = beaten or is_below_half(scores, others, search.seeds, search.objectives[0], search.pruner)
        if beaten is not None:
            return ended("pruned", beaten)
    return ended("complete")


def _half_reward(around: Surroundings, result: RunResult, seen: Mapping[int, float], steps: int) -> dict[str, float]:
    """The reward half-way, where rule 3 needs it and it is known."""
    if around.search.pruner.reward_quantile <= 0:
        return {}
    if result.status == "ok":
        series = read_series(runs_folder(around.launch.results, around.launch.sweep), result.run_id)
        seen = dict(enumerate(series["reward/accuracy"], 1))
    value = reward_at(seen, int(HALF * steps))
    return {} if value is None else {REWARD_HALF: value}


def scores_of(trial: FrozenTrial) -> dict[int, dict[str, float]]:
    """The stored scores of a trial."""
    return {int(seed): dict(values) for seed, values in trial.user_attrs.get("scores", {}).items()}


def complete_trials(study: Study) -> list[FrozenTrial]:
    """The complete trials of a study."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def is_feasible(trial: FrozenTrial) -> bool:
    """Complete, and within the constraint."""
    return trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values())


def has_failed(trial: FrozenTrial) -> bool:
    """Did it fail by itself? A trial whose worker died has no reason."""
    return trial.state == TrialState.FAIL and "reason" in trial.user_attrs


def _half_rewards(trials: Sequence[FrozenTrial], seed: int) -> list[float]:
    found = (scores_of(trial).get(seed, {}).get(REWARD_HALF) for trial in trials)
    return [value for value in found if value is not None]
