"""Tables of a recipe: its settings with their marks, and the published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from harness.published.recipes.recipe import Published, Recipe
from harness.records.run_result import RunResult, read_series

SHARE = 100.0
"""Percent, as papers print accuracies."""


def settings_table(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, mark) of every setting, in the order of the keys."""
    rows = [(key, str(value), mark) for mark, values in recipe.settings.items() for key, value in values.items()]
    return sorted(rows)


def table(recipe: Recipe, records: Mapping[str, Sequence[RunResult]], folder: Path) -> list[tuple[str, str, str, str]]:
    """(metric, arm, published, ours) of every published number; ours as mean over the runs that ended well.

    `records`: arm -> its runs; `folder`: where their series are.
    """
    rows: list[tuple[str, str, str, str]] = []
    for shown in recipe.published:
        head = f"{shown.metric} [{shown.mark}, {shown.source}]"
        others = {arm: "-" for arm in recipe.arms if arm not in shown.values and shown.ours is not None}
        for arm, value in (shown.values | others).items():
            theirs = value if isinstance(value, str) else f"{value:g}"
            rows.append((head, arm, theirs, _ours(shown, records[arm], folder) if arm in records else "-"))
    return rows


def _ours(shown: Published, runs: Sequence[RunResult], folder: Path) -> str:
    if shown.ours is None:
        return "not measured"
    ended = [run for run in runs if run.status == "ok"]
    values = [value for run in ended if (value := measured(run, shown.ours, folder)) is not None]
    lost = "" if len(ended) == len(runs) else f"; {len(runs) - len(ended)} did not end well"
    if not values:
        return f"no result{lost}"
    return f"{SHARE * fmean(values):.2f} ({len(values)} seed{'s' * (len(values) > 1)}{lost})"


def measured(run: RunResult, ours: str, folder: Path) -> float | None:
    """Our measure of a run, 0 to 1: `peak`, the best training accuracy of a step, or `TASK SCORE`, a score of its last
    evaluation on a task in the reference precision, `avg` at whatever k it had. None where the run has none."""
    if ours == "peak":
        column = read_series(folder, run.run_id, ["reward/accuracy"]).get("reward/accuracy", [])
        return max((value for value in column if math.isfinite(value)), default=None)
    task, _, score = ours.partition(" ")
    found = [e for e in run.evaluations if e.task == task and e.site == "reference" and e.error is None]
    scores = max(found, key=lambda e: e.step).scores if found else {}
    return next((value for name, value in scores.items() if name.partition("@")[0] == score), None)
