"""What a table says in words: where the scores disagree, what fell below its start, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import pandas as pd

from harness.records.run_result import RunResult
from harness.records.sweep_file import Expectation

EXPECTED_WITHIN = 0.05
"""Scores that are expected to be close are at most this far apart."""


def findings(board: pd.DataFrame, results: Sequence[RunResult], expectations: Sequence[Expectation] = ()) -> list[str]:
    """Sentences about a leaderboard, strongest first; on point estimates, the verdict column has the intervals."""
    lines: list[str] = []
    for context, rows in board.groupby("context", sort=False):
        where = f" ({context})" if context else ""
        lines += [line + where for line in [*_collapses(rows), *_reversals(rows)]]
    engines = {run.config.get("engine", {}).get("name") for run in results}
    tasks = {run.config.get("task", {}).get("name") for run in results}
    if engines == {"embedded"} and tasks == {"sort"}:
        for context, rows in board.groupby("context", sort=False):
            lines += _expectations(rows, expectations, f" ({context})" if context else "")
    return lines


def _collapses(rows: pd.DataFrame) -> list[str]:
    return [
        f"{row['arm']}: training ends below its start, {row['accuracy']:.2f} against {row['base_accuracy']:.2f}"
        for row in rows.to_dict("records")
        if row["accuracy"] < row["base_accuracy"]
    ]


def _reversals(rows: pd.DataFrame) -> list[str]:
    """Arms of one precision that the two accuracies rank in opposite orders; per precision the clearest pair."""
    lines: list[str] = []
    for precision, group in rows.groupby("precision", sort=False):
        clearest, line = 0.0, ""
        for a, b in permutations(group.to_dict("records"), 2):
            gain, loss = a["accuracy"] - b["accuracy"], b["rollout_accuracy"] - a["rollout_accuracy"]
            if min(gain, loss) > clearest:
                clearest = min(gain, loss)
                line = (
                    f"{precision}: {a['arm']} is ahead of {b['arm']} in the reference precision (by {gain:.2f}) "
                    f"and behind it in the rollout format (by {loss:.2f})"
                )
        lines += [line] if line else []
    return lines


def _expectations(rows: pd.DataFrame, expectations: Sequence[Expectation], where: str) -> list[str]:
    index = {f"{row['method']} {row['precision']} {row['variant']}".strip(): row for row in rows.to_dict("records")}
    lines: list[str] = []
    for expected in expectations:
        low, high = (index.get(arm, {}).get(expected.score, math.nan) for arm in (expected.low, expected.high))
        if not math.isnan(high - low):
            is_held = abs(high - low) <= EXPECTED_WITHIN if expected.is_close else low < high
            word = "as expected" if is_held else "NOT as expected"
            lines.append(f"{word}: {expected.text} ({expected.score} {low:.2f} and {high:.2f}){where}")
    return lines
