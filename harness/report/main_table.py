"""The main table of a sweep for a README: a table for every setting, a row for every arm, with interval and verdict.

Numbers are `harness.report.leaderboard`'s. Left out: what its own report has beside
them (rewards, tests, runs that failed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.records import stats
from harness.records.arms import rank
from harness.records.run_result import RunResult
from harness.records.sweep_file import BASELINES, ENDPOINTS
from harness.report.leaderboard import board_of, contrasts_of
from harness.report.tables import MARKS, difference_cell, interval_cell
from harness.report.verdicts import BELOW, LOWER, legends, verdict_words
from methods import METHODS

Row = Mapping[str, Any]
READING = (
    "Accuracy: held-out, in the reference precision, after the last step; brackets are 95 % bootstrap intervals over "
    "seeds and questions. Against {control}: difference in AUC (mean accuracy of all evaluations after step 0) over "
    "common bases, of the runs that did not collapse, with the interval that decides; of the verdicts of one setting "
    "at most 5 % are expected to be wrong; (+n): n more seeds would tell with a chance of 80 %. As deployed: the same, "
    "every policy in its own rollout format. Against {baseline}: in the reference precision, at equal rollout "
    "precision. Collapsed: runs that diverged or ended below half of their start, with a 95 % interval. k3: mismatch "
    "of sampler and trainer, nats, median over steps."
)


def main_table(
    results: Sequence[RunResult],
    control: str = "bf16",
    baseline: str = BASELINES[-1],
    endpoints: Sequence[str] = ENDPOINTS,
    alpha: float = stats.ALPHA,
) -> str:
    """Markdown; arms with fewer than `stats.MIN_SEEDS` seeds are counted below. Raises ValueError where there is no
    result of `control`."""
    found = board_of(results, control, endpoints, alpha)
    every = found.table.to_dict("records")
    if not any(row["verdict"] == "control" for row in every):
        raise ValueError(f"main table: no result of the control {control!r} to compare with")
    board = [row for row in every if not row["is_preliminary"]]
    rows = contrasts_of(found.arms, found.scores, baseline, endpoints, alpha).to_dict("records")
    against = {row["arm"]: row for row in rows}
    heads = ["method", "rollouts", "accuracy", f"against {control}", "as deployed", f"against {baseline}"]
    heads += ["collapsed", "k3"]
    lines = list[str]()
    for context in dict.fromkeys(row["context"] for row in board):
        lines += [f"{context}:", ""] if context else []
        rows = [_cells(row, against) for row in sorted(board, key=_order) if row["context"] == context]
        lines += [markdown_table(heads, rows, align="llr"), ""]
    used = [f"{mark} {words}" for name, (mark, words) in MARKS.items() if any(row[name] for row in board)]
    used += [f"{len(every) - len(board)} arms with fewer than {stats.MIN_SEEDS} seeds are left out"] * (
        len(board) < len(every)
    )
    reading = [READING.format(control=control, baseline=baseline), *legends([*board, *against.values()], BELOW, LOWER)]
    return "\n".join([*lines, *reading, *(f"{m}." for m in used)]) + "\n"


def _order(row: Row) -> tuple[bool, int, tuple[int, str], str]:
    """Plain settings first, methods as they are registered, precisions from fine to coarse."""
    method, variant, names = row["method"], row["variant"], list(METHODS)
    return bool(variant), names.index(method) if method in names else len(names), rank(row["precision"]), variant


def _cells(row: Row, against: Mapping[str, Row]) -> Sequence[str]:
    marks = "".join(mark for name, (mark, _) in MARKS.items() if row[name])
    return (
        " ".join(filter(None, (row["method"], row["variant"]))) + marks, row["precision"],
        interval_cell("accuracy")(row), _difference(row), _difference(row, "deployed_"),
        _difference(against.get(row["arm"])), row["collapse"], number_cell(row["k3_median"], ".1e"),
    )  # fmt: skip


def _difference(row: Row | None, prefix: str = "") -> str:
    """`-0.021 [-0.05, +0.01], cannot tell (+4)`; the verdict alone where there is no number."""
    if row is None:
        return "-"
    words = verdict_words(row, prefix)
    return words if math.isnan(row[f"{prefix}difference"]) else f"{difference_cell(prefix)(row)}, {words}"
