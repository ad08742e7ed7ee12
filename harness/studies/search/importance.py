"""How much each knob matters, and how much it would seem to matter by chance.

Optuna's fANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014): the share of the variance of a random forest that a knob
explains alone. Shares of the budget are searched for themselves, so the difference between their means is taken out
first and told apart (`between`). A knob that a trial does not have stands at the middle of its range. With a hundred
noisy trials every knob gets some share; the same with shuffled values says how much of that is chance. PED-ANOVA,
Optuna's default, is not used: where a knob exists in the better shares only, it credits the knob with their lead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from harness.records.stats import Floats
from harness.studies.search.spec import Objective, Search

MIN_TRIALS = 12
"""Complete trials below which nothing is said."""
SHUFFLES = 20
TREES = 16


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Of one objective."""

    values: dict[str, float]
    """Knob -> share of the variance within shares, which add up to 1."""
    chance: dict[str, float]
    """Knob -> the largest share in any of the shuffles."""
    between: float
    """Part of the whole variance that lies between the means of the shares; 0 for one share."""


def importances(
    search: Search, trials: Mapping[str, Sequence[FrozenTrial]], shuffles: int = SHUFFLES
) -> dict[str, Importance]:
    """Metric -> importance of every knob, over the complete trials of all shares; empty for too few trials."""
    groups = [[t for t in found if t.state == TrialState.COMPLETE] for found in trials.values()]
    groups = [group for group in groups if group]
    rows = [trial for group in groups for trial in group]
    found: dict[str, Importance] = {}
    for number, objective in enumerate(search.objectives):
        if len(rows) < MIN_TRIALS:
            continue
        values = [np.array([_scale(trial.values[number], objective) for trial in group]) for group in groups]
        centred = np.concatenate([of_group - of_group.mean() for of_group in values])
        whole = np.concatenate(values).var()
        if np.ptp(centred) < 1e-9:
            continue
        rng = np.random.default_rng(0)
        chance = [_shares(search, rows, rng.permutation(centred)) for _ in range(shuffles)]
        measured = _shares(search, rows, centred)
        found[objective.metric] = Importance(
            values=measured,
            chance={name: max((one[name] for one in chance), default=0.0) for name in measured},
            between=float(1 - centred.var() / whole),
        )
    return found


def _scale(value: float, objective: Objective) -> float:
    return math.log(max(value, 1e-300)) if objective.log else value


def _shares(search: Search, rows: Sequence[FrozenTrial], values: Floats) -> dict[str, float]:
    """fANOVA on a study in memory, every knob in every trial."""
    kinds: dict[str, BaseDistribution] = {}
    for trial in rows:
        kinds |= trial.distributions
    kinds = {name: kinds[name] for name in search.space if name in kinds}
    study = optuna.create_study()
    for trial, value in zip(rows, values, strict=True):
        knobs = {name: trial.params.get(name, middle(kind)) for name, kind in kinds.items()}
        study.add_trial(create_trial(value=float(value), params=knobs, distributions=kinds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=TREES, max_depth=8, seed=0))
    return {name: float(found.get(name, 0.0)) for name in kinds}


def middle(kind: BaseDistribution) -> Any:
    """The middle of a knob's range, or its first choice."""
    if isinstance(kind, CategoricalDistribution):
        return kind.choices[0]
    assert isinstance(kind, (FloatDistribution, IntDistribution))
    centre = math.sqrt(kind.low * kind.high) if kind.log else (kind.low + kind.high) / 2
    return round(centre) if isinstance(kind, IntDistribution) else centre
