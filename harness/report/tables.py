"""The verdict table as Markdown, CSV and terminal text. Every number comes from `harness.report.leaderboard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.records import stats
from harness.records.arms import arm_labels, group_arms
from harness.records.run_result import RunResult, write_atomic
from harness.records.statuses import STATUSES
from harness.records.sweep_file import purpose
from harness.report.leaderboard import contrasts, leaderboard
from harness.report.plots.profiles import improvements
from harness.report.sentences import findings

Row = dict[str, Any]
WIDTH = 120
"""Columns of a terminal that a table must fit."""
ENGINE_NOTES = {
    "embedded": "Embedded engine: rollouts run in torch with emulated formats. What carries over to large models is "
    "how formats and corrections act on learning. What does not: absolute numbers, the order of fp8 and int8, and "
    "anything about speed (emulated formats are slower than BF16). There is no kernel noise, and responses of 9 to 33 "
    "tokens do not stress sequence-level products of ratios.",
}
READING = (
    "Three scores: accuracy in the reference precision (comparable across rows), accuracy in the run's own rollout "
    "format, and the sampler's reward over the last five steps. AUC, the primary endpoint, is the mean reference "
    "accuracy of the evaluations after step 0.",
    "Means over seeds; brackets are 95 % bootstrap intervals over seeds and questions. The difference is AUC minus the "
    "control's over runs with equal seeds and questions, with a 95 % t interval; p is adjusted over the "
    f"arms of one length: by Holm up to {stats.MAX_DECLARED} comparisons, by the false discovery rate above.",
    f"Verdict: equal where the interval lies within ±{stats.DELTA:g}; better or worse where it excludes 0 and the "
    "adjusted p is below 0.05; otherwise cannot tell, with the number of further seeds that would show the difference.",
    "P(better): the chance that a run has a higher AUC than a run of the control, with a 95 % score interval. The CSV "
    "also has the interval over new seeds and questions, the p of equality, and McNemar's test on the final answers.",
    "A diverged run scores 0 at every evaluation it did not reach. Failed, cancelled and skipped runs are counted and "
    "not scored.",
)
MARKS = {
    "is_preliminary": ("*", f"preliminary, fewer than {stats.MIN_SEEDS} seeds"),
    "reconstructed": ("†", "reconstructed, part of the rule is ours because no source gives it"),
    "is_draft": ("‡", "draft, run from a working tree with uncommitted changes"),
}


def write_tables(results: Sequence[RunResult], folder: Path, sweep: str, control: str = "bf16") -> list[Path]:
    """Write `<sweep>.md`, `<sweep>.csv` (one row per arm) and `<sweep>_runs.csv` (one row per run) into `folder`.

    Raises ValueError for no results at all, or where a file cannot be written.
    """
    if not results:
        raise ValueError(f"sweep {sweep!r} has no results to tabulate")
    board = leaderboard(results, control)
    texts = {
        f"{sweep}.md": markdown(board, results, sweep),
        f"{sweep}.csv": board.to_csv(index=False, float_format="%.6g"),
        f"{sweep}_runs.csv": runs_table(results).to_csv(index=False, float_format="%.6g"),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in texts]


def runs_table(results: Sequence[RunResult]) -> pd.DataFrame:
    """One row per run: identity, status and its summary."""
    labels = arm_labels(results)
    rows = [
        {
            "run_id": run.run_id,
            "arm": labels[run.run_id],
            "base_seed": run.base_seed,
            "seed": run.seed,
            "status": run.status,
            "reason": run.reason,
            "is_draft": run.is_draft,
            "num_steps": run.num_steps,
            "total_s": run.time_s.get("total"),
            **run.summary,
        }
        for run in results
    ]
    return pd.DataFrame(rows).sort_values(["arm", "base_seed", "seed"], ignore_index=True)


def markdown(board: pd.DataFrame, results: Sequence[RunResult], sweep: str) -> str:
    """The report of a sweep: what was run, the table per context, contrasts, findings, failures, how to read it."""
    blocks = [f"# {sweep}", "\n".join(f"- {line}" for line in setup_lines(results)), _control_line(board)]
    for context, rows in board.groupby("context", sort=False):
        blocks += [f"## {context}"] if context else []
        blocks.append(_grid(_ARM_COLUMNS, rows))
    over = improvements(group_arms(results), _control_method(board))
    if len(over):
        blocks += ["## Probability of improvement over the control, all settings", _grid(_OVER_COLUMNS, over)]
    against = contrasts(results)
    if len(against):
        blocks += ["## What changes against no correction, at the same precision", _grid(_CONTRAST_COLUMNS, against)]
    said = findings(board, results, purpose(sweep).expectations)
    blocks += ["## In words", "\n".join(f"- {line}" for line in said)] if said else []
    if bad := [run for run in results if run.status != "ok"]:
        labels = arm_labels(results)
        lines = [f"- {labels[run.run_id]}, seed {run.seed}: {run.status}, {run.reason} (`{run.run_id}`)" for run in bad]
        blocks += ["## Runs that did not finish", "\n".join(lines)]
    return (
        "\n\n".join(
            [*blocks, "## How to read it", "\n".join(f"- {line}" for line in [*READING, *_marks(board, "`{}`")])]
        )
        + "\n"
    )


def setup_lines(results: Sequence[RunResult]) -> list[str]:
    """What was run, from the configs: task, model, channel spread, algorithm, steps, seeds, code and machine."""
    arms = group_arms(results)

    def values(*names: str, form: Callable[..., str]) -> str:
        found = [[arm.fields.get(name) for name in names] for arm in arms]
        return ", ".join(dict.fromkeys(form(*row) for row in found if row[0] is not None))

    pairs = {(run.base_seed, run.seed) for run in results}
    lines = [
        "Task " + values("task.name", "task.n", "task.num_eval", form=_task) + "; model "
        + values("model.name", "model.num_layers", "model.hidden_size", form=_model) + "; channel spread sigma "
        + values("model.spread", form=lambda spread: f"{spread:g}"),
        values("algo.name", form=str) + ", "
        + values("algo.num_prompts", "algo.group_size", form=lambda p, g: f"{p} prompts x {g} samples per step, ")
        + values("trainer.steps", form=lambda steps: f"{steps} steps")
        + f"; {len(pairs)} pairs of base seed and RL seed",
        _provenance(results),
    ]  # fmt: skip
    engines = dict.fromkeys(arm.fields.get("engine.name") for arm in arms)
    return lines + [ENGINE_NOTES[name] for name in engines if name in ENGINE_NOTES]


def render_terminal(board: pd.DataFrame) -> str:
    """The leaderboard as text of at most 120 columns."""
    lines: list[str] = []
    width = WIDTH - sum(width + 1 for _, width, _ in _TERMINAL_COLUMNS)
    names = [_arm_name(row) for row in board.to_dict("records")]
    width = min(width, max(map(len, names), default=0))
    for context, rows in board.groupby("context", sort=False):
        lines += ["", f"{context}"] if context else []
        lines.append(" ".join(["arm".ljust(width), *(head.rjust(size) for head, size, _ in _TERMINAL_COLUMNS)]))
        lines.append("─" * len(lines[-1]))
        for row in rows.to_dict("records"):
            name = _arm_name(row)
            name = name if len(name) <= width else name[: width - 1] + "…"
            cells = [show(row)[:size].rjust(size) for _, size, show in _TERMINAL_COLUMNS]
            lines.append(" ".join([name.ljust(width), *cells]).rstrip())
    lines += ["", _control_line(board), "(+n): about n more seeds would tell. ±: 95 %, the wider side. p adjusted."]
    return "\n".join([*lines, *_marks(board)]).strip("\n")


def _control_line(board: pd.DataFrame) -> str:
    controls = dict.fromkeys(row["control"] for row in board.to_dict("records") if row["control"])
    return f"Control: {', '.join(controls) or 'none in this table'}."


def _control_method(board: pd.DataFrame) -> str:
    """The method of the control's arms; empty where the table has none."""
    return next((row["method"] for row in board.to_dict("records") if row["verdict"] == "control"), "")


def _arm_name(row: Row) -> str:
    """Method, precision and variant with the marks; the context stands above the table."""
    marks = "".join(mark for column, (mark, _) in MARKS.items() if row[column])
    return " ".join(filter(None, [row["method"], row["precision"], row["variant"]])) + marks


def _marks(board: pd.DataFrame, form: str = "{}") -> list[str]:
    """The marks in use; Markdown quotes them, since a star at the start of a line makes a list there."""
    return [f"{form.format(mark)} {text}" for column, (mark, text) in MARKS.items() if any(board[column])]


def _number(value: float, form: str = ".3f") -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _bracket(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if math.isnan(row[f"{name}_low"]):
            return _number(row[name])
        return f"{row[name]:.3f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"

    return show


def _half(name: str, form: str = ".3f") -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if math.isnan(row[f"{name}_low"]):
            return _number(row[name], form)
        half = max(row[f"{name}_high"] - row[name], row[name] - row[f"{name}_low"])
        return f"{row[name]:{form}}±{half:.3f}".replace("±0.", "±.")

    return show


def _difference(row: Row) -> str:
    if math.isnan(row["difference_low"]):
        return _number(row["difference"], "+.3f")
    return f"{row['difference']:+.3f} [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}]"


def _chance(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if math.isnan(row[name]):
            return "-"
        low, high = ("low", "high") if name == "probability" else (f"{name}_low", f"{name}_high")
        return f"{row[name]:.2f} [{row[low]:.2f}, {row[high]:.2f}]"

    return show


def _p(row: Row) -> str:
    p = row["p_adjusted"]
    return "-" if math.isnan(p) else "<.001" if p < 0.001 else f"{p:.3f}"


def _verdict(row: Row) -> str:
    return row["verdict"] + ("" if math.isnan(more := row["further_seeds"] or math.nan) else f" (+{more:.0f})")


def _seeds(row: Row) -> str:
    """Scored runs of all runs."""
    total = sum(row[status] for status in STATUSES)
    return f"{row['seeds']}" if row["ok"] == total else f"{row['seeds']}/{total}"


def _small(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row[name], ".2g" if 1e-4 <= abs(row[name]) < 100 else ".0e")


def _grid(columns: Iterable[tuple[str, Callable[[Row], str]]], rows: pd.DataFrame) -> str:
    """A Markdown table; the first column is text, the others align right."""
    columns = list(columns)
    lines = ["| " + " | ".join(head for head, _ in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows.to_dict("records")]
    return "\n".join(lines)


def _task(name: str, n: int | None, num_eval: int | None) -> str:
    return name + (f" n={n}" if n is not None else "") + (f" ({num_eval} held-out questions)" if num_eval else "")


def _model(name: str, num_layers: int | None, hidden_size: int | None) -> str:
    return name + (f" ({num_layers} layers x {hidden_size})" if num_layers else "")


def _provenance(results: Sequence[RunResult]) -> str:
    commits = dict.fromkeys((run.commit or "unknown")[:10] for run in results)
    torch = dict.fromkeys(run.packages["torch"] for run in results if "torch" in run.packages)
    machines = dict.fromkeys(str(run.hardware.get("gpu") or run.hardware.get("cpu") or "unknown") for run in results)
    return f"Commit {', '.join(commits)}; torch {', '.join(torch) or 'unknown'}; {', '.join(machines)}"


_ARM_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", _arm_name),
    ("seeds", _seeds),
    ("accuracy, reference", _bracket("accuracy")),
    ("accuracy, rollout format", _bracket("rollout_accuracy")),
    ("sampler reward", _bracket("reward")),
    ("AUC", _bracket("auc")),
    ("AUC, IQM", _bracket("auc_iqm")),
    ("difference to control", _difference),
    ("p", _p),
    ("P(better)", _chance("improvement")),
    ("verdict", _verdict),
    ("max k3, nats", _small("k3_max")),
    ("raw ESS", lambda row: _number(row["ess_token_raw"], ".2f")),
    ("entropy, nats", lambda row: _number(row["entropy_last"], ".2f")),
    ("runs", lambda row: row["status"]),
)
_CONTRAST_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: row["arm"]),
    ("against", lambda row: row["control"]),
    ("pairs", lambda row: str(row["pairs"])),
    ("AUC difference", _difference),
    ("p", _p),
    ("verdict", _verdict),
)
_OVER_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: row["arm"]),
    ("settings", lambda row: str(row["settings"])),
    ("runs", lambda row: str(row["runs"])),
    ("P(better)", _chance("probability")),
)
_TERMINAL_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("seeds", 5, _seeds),
    ("reference", 10, _half("accuracy")),
    ("as rolled", 10, _half("rollout_accuracy")),
    ("reward", 6, lambda row: _number(row["reward"])),
    ("AUC", 10, _half("auc")),
    ("vs control", 11, _half("difference", "+.3f")),
    ("p", 5, _p),
    ("max k3", 6, _small("k3_max")),
    ("verdict", 17, _verdict),
)
"""(heading, columns, cell)."""
