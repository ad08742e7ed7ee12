"""Figures of a search, drawn by Optuna from the stored study: history, importances, slices, Pareto front.

Shares of the budget are studies of their own: the history shows all of them, every other figure one. Importance is
fANOVA's (Hutter, Hoos and Leyton-Brown, ICML 2014), which speaks of each objective; Optuna's default speaks of the
Pareto front as a whole.

Left out: what importance would come out by chance. With few trials every knob gets some.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from optuna import Study
from optuna.importance import FanovaImportanceEvaluator
from optuna.trial import FrozenTrial
from optuna.visualization.matplotlib import (
    plot_optimization_history,
    plot_param_importances,
    plot_pareto_front,
    plot_slice,
)

from harness.records.paths import figures_folder
from harness.studies.search.spec import Search
from harness.studies.search.store import open_studies
from harness.studies.search.trials import complete_trials

MIN_FRONT = 5
"""Complete trials from which on a Pareto front is drawn."""


def draw_search(search: Search, results: Path) -> list[Path]:
    """Write the figures into `figures/<name>/`: their paths.

    A study without a complete trial is left out, slices of a single one, importance where an objective has one value or
    the search one knob, and the Pareto front of fewer than MIN_FRONT trials.
    """
    studies = open_studies(search, results, is_writing=False)
    shown = {share: study for share, study in studies.items() if complete_trials(study)}
    metrics = [objective.metric for objective in search.objectives]
    first: dict[str, Any] = {"target": first_value, "target_name": metrics[0]}
    draws: dict[str, Callable[[], Any]] = {}
    if shown:
        draws["history"] = partial(plot_optimization_history, list(shown.values()), **first)
    for share, study in shown.items():
        end = f"_{share}" if share else ""
        done = complete_trials(study)
        has_values = all(len(set(values)) > 1 for values in zip(*(trial.values for trial in done), strict=True))
        if has_values and len({knob for trial in done for knob in trial.params}) > 1:
            draws[f"importance{end}"] = partial(plot_param_importances, study, FanovaImportanceEvaluator(seed=0))
        if len(done) > 1:
            draws[f"slice{end}"] = partial(slices, study, **first)
        if len(metrics) > 1 and len(done) >= MIN_FRONT:
            draws[f"pareto{end}"] = partial(plot_pareto_front, study, targets=first_two, target_names=metrics[:2])
    return [save(draw, figures_folder(results, search.name) / f"{name}.png") for name, draw in draws.items()]


def slices(study: Study, **first: Any) -> Any:
    """Axes of Optuna's slices, with slanted labels: names of choices ran over each other."""
    axes: Any = plot_slice(study, **first)
    for ax in np.ravel(axes):
        ax.tick_params(axis="x", labelrotation=30)
    return axes


def first_value(trial: FrozenTrial) -> float:
    """The value of the first objective."""
    return trial.values[0]


def first_two(trial: FrozenTrial) -> list[float]:
    """The values of the first two objectives."""
    return trial.values[:2]


def save(draw: Callable[[], Any], path: Path) -> Path:
    """Draw one figure, `draw` returns its axes, and write it whole. Optuna changes matplotlib's style: undone here."""
    with mpl.rc_context():
        figure = np.ravel(draw())[0].figure
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")  # a full disk must not leave half a figure
        figure.savefig(temporary, format="png", metadata={}, bbox_inches="tight")
        plt.close(figure)
    return temporary.replace(path)
