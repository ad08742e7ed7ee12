"""The main table of a sweep for a README: a table for every setting, a row for every arm, with interval and verdict.

Numbers are `harness.report.leaderboard`'s. Left out: what its own report has beside
them (rewards, tests, runs that failed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.records import stats
from harness.records.arms import rank
from harness.records.run_result import RunResult
from harness.records.sweep_file import BASELINES
from harness.report.leaderboard import contrasts, leaderboard
from harness.report.tables import MARKS
from methods import METHODS

Row = Mapping[str, Any]
READING = (
    "Accuracy: held-out, in the reference precision, after the last step; brackets are 95 % bootstrap intervals over "
    "seeds and questions. As rolled: the same in the run's own rollout format. Against {control}: difference in AUC "
    "(mean accuracy of all evaluations after step 0), paired by seed, with its interval and the verdict after "
    f"correction for the arms of its setting (Holm up to {stats.MAX_DECLARED}, false discovery rate above); (+n): "
    "about n more seeds would tell. Against {baseline}: the same at equal precision. k3: mismatch of sampler and "
    "trainer, nats, median over steps."
)


def main_table(results: Sequence[RunResult], control: str = "bf16", baseline: str = BASELINES[-1]) -> str:
    """Markdown; arms with fewer seeds than the control are counted below. Raises ValueError where there
    is no result of `control`."""
    every = leaderboard(results, control).to_dict("records") if results else []
    whole = max((row["seeds"] for row in every if row["verdict"] == "control"), default=0)
    if not whole:
        raise ValueError(f"main table: no result of the control {control!r} to compare with")
    board = [row for row in every if row["seeds"] >= whole]
    against = {row["arm"]: row for row in contrasts(results, baseline).to_dict("records")}
    heads = ["method", "rollouts", "accuracy", "as rolled", f"against {control}", f"against {baseline}", "k3"]
    lines = list[str]()
    for context in dict.fromkeys(row["context"] for row in board):
        lines += [f"{context}:", ""] if context else []
        lines += [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
        lines += [_line(row, against) for row in sorted(board, key=_order) if row["context"] == context] + [""]
    used = [f"{mark} {words}" for name, (mark, words) in MARKS.items() if any(row[name] for row in board)]
    used += [f"{len(every) - len(board)} arms with fewer seeds than {whole} are left out"] * (len(board) < len(every))
    return "\n".join([*lines, READING.format(control=control, baseline=baseline), *(f"{m}." for m in used)]) + "\n"


def _order(row: Row) -> tuple[bool, int, tuple[int, str], str]:
    """Plain settings first, methods as they are registered, precisions from fine to coarse."""
    method, variant, names = row["method"], row["variant"], list(METHODS)
    return bool(variant), names.index(method) if method in names else len(names), rank(row["precision"]), variant


def _line(row: Row, against: Mapping[str, Row]) -> str:
    marks = "".join(mark for name, (mark, _) in MARKS.items() if row[name])
    accuracy = _number(row["accuracy"], ".3f")
    if not math.isnan(row["accuracy_low"]):
        accuracy += f" [{row['accuracy_low']:.2f}, {row['accuracy_high']:.2f}]"
    cells = (
        " ".join(filter(None, (row["method"], row["variant"]))) + marks, row["precision"], accuracy,
        _number(row["rollout_accuracy"], ".3f"), _difference(row), _difference(against.get(row["arm"])),
        _number(row["k3_median"], ".1e"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _difference(row: Row | None) -> str:
    """`-0.021 [-0.05, +0.01], cannot tell (+4)`; the verdict alone where there is no number."""
    if row is None:
        return "-"
    more = row["further_seeds"]
    words = row["verdict"] + (f" (+{more:.0f})" if more is not None and not math.isnan(more) else "")
    if math.isnan(row["difference"]):
        return words
    interval = f" [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}]"
    return f"{row['difference']:+.3f}{'' if math.isnan(row['difference_low']) else interval}, {words}"
