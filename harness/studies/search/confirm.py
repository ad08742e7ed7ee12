"""The best trial once more, on fresh seeds beside the baselines: the score that won a search is too good by selection.

The best of many trials was partly lucky (the winner's curse), so no verdict rests on the scores of the search. What is
compared is the difference of best and baseline over seeds that no trial has seen, paired by base and seed, in the
objective's own scale: of logarithms where the search compares logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from optuna.trial import FrozenTrial

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.foundation.digits import significant
from harness.records.run_result import Pair, RunResult
from harness.records.stats import Difference, paired
from harness.studies.search.cells import is_settled, run_one
from harness.studies.search.pruning import oriented, scaled
from harness.studies.search.run import Session
from harness.studies.search.space import DIGITS, cell_of, overrides_of
from harness.studies.search.spec import Objective, Search, best_name
from harness.studies.search.trials import is_feasible, measured, scores_of
from harness.sweep import stored

Trials = Mapping[str, Sequence[FrozenTrial]]
"""Share -> its trials."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An arm that is run on the fresh seeds."""

    name: str
    kind: Literal["baseline", "best", "reference"]
    share: str
    overrides: tuple[str, ...]
    number: int | None = None
    """Number of its trial; references have none."""


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """The knobs of a trial as they went into its cells, with that of its share."""
    return dict(trial.user_attrs.get("values") or {k: significant(v, DIGITS) for k, v in trial.params.items()})


def best_of(search: Search, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The feasible trial with the best first objective; None where there is none."""
    feasible = [trial for trial in trials if is_feasible(trial)]
    return max(feasible, key=lambda t: oriented(t.values[0], search.objectives[0])) if feasible else None


def best_found(search: Search, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best one that the search proposed itself: it is confirmed even where a baseline scored higher."""
    return best_of(search, [trial for trial in trials if "baseline" not in trial.user_attrs])


def contenders(search: Search, trials: Trials) -> list[Contender]:
    """Baselines and best of every share, then the references."""
    found: list[Contender] = []
    for share, of_share in trials.items():
        started = {t.user_attrs["baseline"]: t.number for t in of_share if "baseline" in t.user_attrs}
        for name, number in started.items():  # of the last attempt, where a worker died
            words = tuple(overrides_of(search, search.baselines[name]))
            found.append(Contender(name=name, kind="baseline", share=share, overrides=words, number=number))
        best = best_found(search, of_share)
        if best is not None:
            words = tuple(overrides_of(search, values_of(best)))
            name = best_name(share)
            found.append(Contender(name=name, kind="best", share=share, overrides=words, number=best.number))
    for name, words in search.references.items():
        found.append(Contender(name=name, kind="reference", share="", overrides=(*search.overrides, *words)))
    return found


def submit(session: Session, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Every cell of the confirmation, seeds outermost."""
    search, around = session.search, session.around
    trials = {share: study.get_trials(deepcopy=False) for share, study in session.studies.items()}
    cells = [
        cell_of(list(contender.overrides), seed)
        for seed in search.confirm.seeds
        for contender in contenders(search, trials)
    ]
    return [pool.submit(run_one, cell, around.launch, around.runner, around.stop) for cell in cells]


def confirmed(search: Search, found: Sequence[Contender], launch: Launch) -> dict[str, dict[int, RunResult]]:
    """Contender -> seed -> record, of those that are there, in a folder or packed."""
    known = stored(launch)
    records: dict[str, dict[int, RunResult]] = {}
    for contender in found:
        records[contender.name] = {
            seed: result
            for seed in search.confirm.seeds
            if (result := known.get(run_id(cell_of(list(contender.overrides), seed)))) is not None
            and is_settled(result)
        }
    return records


def fresh_scores(records: Mapping[int, RunResult], metric: str, is_log: bool) -> dict[Pair, float]:
    """Base and seed -> `scaled` score of the cells that ended well."""
    scores = {result.pair: measured(result, metric) for result in records.values() if result.status == "ok"}
    return {pair: scaled(value, is_log) for pair, value in scores.items() if value is not None}


def compared(arm: Mapping[int, RunResult], control: Mapping[int, RunResult], objective: Objective) -> Difference:
    """Arm minus control, `scaled`, over the fresh seeds that both have, each from the same base."""
    own, other = (fresh_scores(records, objective.metric, objective.log) for records in (arm, control))
    return paired(own, other)


def searched_lead(trial: FrozenTrial, control: FrozenTrial, objective: Objective) -> float:
    """Mean of trial minus control, `scaled`, over the seeds of the search that both have; NaN where there is none."""
    own, other = scores_of(trial), scores_of(control)
    gaps = [
        scaled(own[seed][objective.metric], objective.log) - scaled(other[seed][objective.metric], objective.log)
        for seed in own
        if objective.metric in own[seed] and objective.metric in other.get(seed, {})
    ]
    return fmean(gaps) if gaps else math.nan
