"""Tables of a recipe: its settings with their marks, and the published numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from harness.published.recipes.recipe import Published, Recipe
from harness.records.run_result import RunResult

SHARE = 100.0
"""Percent, as papers print accuracies."""


def settings_table(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, mark) of every setting, in the order of the keys."""
    rows = [(key, str(value), mark) for mark, values in recipe.settings.items() for key, value in values.items()]
    return sorted(rows)


def table(recipe: Recipe, records: Mapping[str, Sequence[RunResult]]) -> list[tuple[str, str, str, str]]:
    """(metric, arm, published, ours) of every published number; ours as mean over the runs that ended well.

    `records`: arm -> its runs.
    """
    rows: list[tuple[str, str, str, str]] = []
    for shown in recipe.published:
        head = f"{shown.metric} [{shown.mark}, {shown.source}]"
        for arm, value in shown.values.items():
            theirs = value if isinstance(value, str) else f"{value:g}"
            rows.append((head, arm, theirs, _ours(shown, records.get(arm, ())) if arm in recipe.arms else "-"))
        for arm in recipe.arms:
            if arm not in shown.values:
                rows.append((head, arm, "-", _ours(shown, records.get(arm, ()))))
    return rows


def _ours(shown: Published, runs: Sequence[RunResult]) -> str:
    if shown.ours is None:
        return "not measured"
    ended = [run for run in runs if run.status == "ok"]
    values = [value for run in ended if (value := measured(run, shown.ours)) is not None]
    lost = "" if len(ended) == len(runs) else f", {len(runs) - len(ended)} did not end well"
    if not values:
        return f"no run{lost}"
    return f"{SHARE * fmean(values):.2f} ({len(values)} seed{'s' * (len(values) > 1)}{lost})"


def measured(run: RunResult, ours: str) -> float | None:
    """Our measure of a run, 0 to 1."""
    if ours == "accuracy":
        return run.summary.get("final_accuracy")
    return None


def rendered(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)
