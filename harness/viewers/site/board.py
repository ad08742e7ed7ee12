"""The leaderboard rows, figures and saved comparisons of one sweep, as the page's JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.foundation.number_cell import interval_cell
from harness.records.arms import arm_labels
from harness.records.folder import runs_of, saved_comparisons
from harness.records.looks import level_of
from harness.records.paths import figures_folder
from harness.records.run_result import RunResult
from harness.records.stats import further
from harness.records.statuses import STATUSES
from harness.records.sweep_file import purpose
from harness.viewers.mlflow.links import condition

NUMBERS = (
    "auc", "auc_low", "auc_high", "accuracy", "accuracy_low", "accuracy_high", "rollout_accuracy",
    "rollout_accuracy_low", "rollout_accuracy_high", "reward", "difference", "difference_low", "difference_high",
    "p_adjusted", "k3_max", "ess_token_raw", "entropy_last", "rollout_tokens_per_s", "total_s",
    "peak_memory_gib", "base_accuracy",
)  # fmt: skip
WORDS = ("arm", "method", "precision", "variant", "context", "control", "verdict", "status", "reconstructed")
ENDS = {"auc": ".3f", "difference": "+.3f"}
"""Score -> form of the ends of its interval, as the page's words of it."""
FLAGS = ("is_preliminary", "is_draft")
DIGITS = 4
"""Significant digits of a number in the page."""


def sweep_entry(results: Path, sweep: str) -> tuple[dict[str, Any], list[RunResult]]:
    """(what the page says of a sweep, its readable results); without any the problems alone."""
    from harness.report.leaderboard import leaderboard
    from harness.report.tables import setup_lines
    from harness.report.verdicts import shown_verdict

    runs, problems = runs_of(results, sweep)
    if not runs:
        return {"problems": problems}, []
    aim = purpose(sweep, results)
    rows = leaderboard(runs, aim.control, aim.endpoints, level_of(results, sweep)).to_dict("records")
    figures = sorted(figures_folder(results, sweep).glob("*.png"))
    entry = {
        "name": sweep,
        "question": aim.question,
        "setup": setup_lines(runs),
        "problems": short_problems(problems),
        "columns": [*WORDS, "further", *FLAGS, "seeds", "n", *NUMBERS, *(f"{name}_ends" for name in ENDS)],
        "rows": [_row({**row, "verdict": shown_verdict(row)}) for row in rows],
        "figures": [f"../figures/{sweep}/{path.name}" for path in figures],
        "comparisons": [
            {"title": c.title, "group": c.group, "methods": c.methods, "precision": c.precision, "context": c.context,
             "filter": condition(c)} for c in saved_comparisons(rows, aim.baselines)
        ],
        "labels": arm_labels(runs),
        "engines": sorted({str(run.config.get("engine", {}).get("name")) for run in runs}),
    }  # fmt: skip
    return entry, runs


def short_problems(lines: Sequence[str]) -> list[str]:
    """Lines `path: reason` with the file's name alone."""
    return [Path(line.partition(":")[0]).name + ":" + line.partition(":")[2] for line in lines]


def _row(row: Mapping[str, Any]) -> list[Any]:
    total = sum(row[status] for status in STATUSES)
    words = [*(row[name] for name in WORDS), further(row["further_seeds"])]
    ends = [interval_cell(row[f"{name}_low"], row[f"{name}_high"], form) for name, form in ENDS.items()]
    return [*words, *(int(row[name]) for name in FLAGS), row["seeds"], total, *(number(row[n]) for n in NUMBERS), *ends]


def number(value: Any) -> float | int | None:
    """A number with DIGITS significant digits; None for what is none."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded
