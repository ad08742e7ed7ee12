"""The main table of a sweep for a README: a row per arm, settings side by side, each with interval and verdict.

Numbers are `harness.leaderboard`'s. Left out: what its own report has beside them (rewards, tests, runs that failed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.arms import rank
from harness.leaderboard import contrasts, leaderboard
from harness.report import MARKS
from harness.results import RunResult
from methods import METHODS

Row = Mapping[str, Any]
READING = (
    "Accuracy: held-out, in the reference precision, after the last step; brackets are 95 % bootstrap intervals over "
    "seeds and questions. Against {control}: difference in AUC (the mean accuracy of all evaluations after step 0), "
    "paired by seed, with its interval and the verdict after Holm's correction; (+n): about n more seeds would tell. "
    "Against {baseline}: the same at equal precision. k3: mismatch of sampler and trainer, nats, median over steps."
)


def main_table(results: Sequence[RunResult], control: str = "bf16", baseline: str = "naive") -> str:
    """Markdown. Raises ValueError where there is no result of `control`."""
    board = leaderboard(results, control).to_dict("records") if results else []
    if not any(row["verdict"] == "control" for row in board):
        raise ValueError(f"main table: no result of the control {control!r} to compare with")
    against = {row["arm"]: row for row in contrasts(results, baseline).to_dict("records")}
    contexts = list(dict.fromkeys(row["context"] for row in board))
    arms: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in board:
        arms.setdefault((row["method"], row["precision"], row["variant"]), {})[row["context"]] = row
    heads = ["accuracy", f"against {control}", f"against {baseline}", "k3"]
    lines = [
        "| method | rollouts | " + " | ".join(f"{head}, {c}" if c else head for c in contexts for head in heads) + " |",
        "|---|---|" + "---:|" * (len(heads) * len(contexts)),
    ]
    for key in sorted(arms, key=_order):
        cells = [text for context in contexts for text in _cells(arms[key].get(context), against)]
        marks = "".join(mark for name, (mark, _) in MARKS.items() if any(row[name] for row in arms[key].values()))
        lines.append(f"| {' '.join(filter(None, (key[0], key[2])))}{marks} | {key[1]} | " + " | ".join(cells) + " |")
    used = [f"{mark} {words}" for name, (mark, words) in MARKS.items() if any(row[name] for row in board)]
    return "\n".join([*lines, "", READING.format(control=control, baseline=baseline), *(f"{m}." for m in used)]) + "\n"


def _order(key: tuple[str, str, str]) -> tuple[bool, int, tuple[int, str], str]:
    """Plain settings first, methods as they are registered, precisions from fine to coarse."""
    method, precision, variant = key
    names = list(METHODS)
    return bool(variant), names.index(method) if method in names else len(names), rank(precision), variant


def _cells(row: Row | None, against: Mapping[str, Row]) -> list[str]:
    if row is None:
        return ["-"] * 4
    accuracy = "-" if math.isnan(row["accuracy"]) else f"{row['accuracy']:.3f}"
    if not math.isnan(row["accuracy_low"]):
        accuracy += f" [{row['accuracy_low']:.2f}, {row['accuracy_high']:.2f}]"
    k3 = "-" if math.isnan(row["k3_median"]) else f"{row['k3_median']:.1e}"
    return [accuracy, _difference(row), _difference(against.get(row["arm"])), k3]


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
