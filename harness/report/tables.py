"""The verdict table as Markdown, CSV and terminal text. Every number comes from `harness.report.leaderboard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell, with_interval
from harness.foundation.text_table import text_table
from harness.foundation.whole_file import write_atomic
from harness.records import stats
from harness.records.arms import arm_labels, group_arms, label
from harness.records.run_result import RunResult, base_names
from harness.records.statuses import STATUSES
from harness.records.sweep_file import BASELINES, ENDPOINTS, Expectation
from harness.report import collapse_times, failures, task_scores
from harness.report.leaderboard import Board
from harness.report.plots.profiles import improvements
from harness.report.scores import components
from harness.report.sentences import findings, three_sentences
from harness.report.verdicts import (
    BELOW,
    BELOW_ON,
    LOWER,
    LOWER_ON,
    PREFIXES,
    VERDICT_WIDTH,
    legends,
    short_verdict,
    verdict_words,
)
from methods import METHODS

Row = Mapping[str, Any]
WIDTH = 100
"""Columns of a terminal that a table must fit."""
ENGINE_NOTES = {
    "embedded": "Embedded engine: rollouts run in torch with emulated formats. What carries over to large models is "
    "how formats and corrections act on learning. What does not: absolute numbers, the order of fp8 and int8, and "
    "anything about speed (emulated formats are slower than BF16). There is no kernel noise, and short responses do "
    "not stress sequence-level products of ratios.",
}
LOOKS = (
    "Verdicts are given at {:.1f} % in place of 3.3 %: somebody read them and then added runs, so each is one of "
    "several looks"
)
READING = (
    "Two endpoints, each the mean accuracy of the evaluations after step 0: the BF16 policy (AUC), comparable across "
    "rows, and the policy as deployed, in the run's own rollout format. Accuracy is that after the last step, in the "
    "reference precision; the reward is the sampler's over the last five steps. Brackets beside means are 95 % "
    "bootstrap intervals over bases (over seeds where there is one base) and questions.",
    "A difference is the arm minus its control over common bases and questions, over the runs that did not collapse. "
    "Its interval is the one that decides: of the verdicts of one length and one endpoint at most 5 % are expected to "
    "be wrong (a false discovery rate over its arms). Variances lean on those of the other arms (moderated).",
    f"Verdict: better or worse where the interval excludes 0, equal where it lies within ±{stats.DELTA:g} (where it "
    "does both, the surer of the two), else cannot tell. (+n): n more seeds (bases, where there are several) would "
    f"decide with a chance of 80 %, given what was seen; (>{stats.MOST}): more than that. No signal: the arm or its "
    "control never left its start, or both sit at 0. Collapses in x of n: so many runs diverged, or ended below half "
    "of the accuracy they started from; what the others show follows.",
    "Effective bits: what the rollout stores for the linear layers (codes, scales, zero points, adapters in 16 bits) "
    "over their number of weights.",
    "Collapsed: of all runs, with a 95 % interval (Clopper and Pearson). No verdict says more about collapse than it.",
    "P(better): the chance that a run has a higher AUC than a run of the control on the same bases, with a 95 % score "
    "interval. The CSV also has the interval over new seeds and questions, the p of equality, and McNemar's test on "
    "the final answers.",
    "Seeds: the runs that are scored, of all where some are not. A diverged run scores 0 at every evaluation it did "
    "not reach. Failed, cancelled and skipped runs are counted and not scored.",
    "Ranked by: the endpoint that orders the arms of a format. Max k3: the largest mismatch of sampler and trainer in "
    "a step of any run, nats a token. Raw ESS: the share of tokens that importance weights without a bound leave in "
    "effect, the median of steps and runs. Entropy: the trainer's, mean of the last five steps.",
)
TASKS = (
    "After the last step at which the task was asked. avg@k: share of right samples; pass@k: chance that k samples "
    "hold a right one, unbiased; maj@k: score of the most frequent answer; greedy: of the most probable tokens. "
    "reference: weights in BF16 on vLLM, in float32 on the embedded engine; rollout: as rolled. Intervals are over "
    "seeds and questions."
)
MARKS = {
    "is_preliminary": ("*", f"preliminary, fewer than {stats.MIN_SEEDS} seeds"),
    "reconstructed": ("†", "reconstructed, part of the rule is ours because no source gives it"),
    "is_draft": ("‡", "draft, run from code with uncommitted changes"),
}


def write_tables(board: Board, folder: Path, sweep: str, expectations: Sequence[Expectation] = ()) -> list[Path]:
    """Write `<sweep>.md`, `<sweep>.csv` (one row per arm) and `<sweep>_runs.csv` (one row per run) into `folder`.

    Raises ValueError where a file cannot be written.
    """
    texts = {
        f"{sweep}.md": markdown(board, sweep, expectations),
        f"{sweep}.csv": board.table.to_csv(index=False, float_format="%.6g"),
        f"{sweep}_runs.csv": runs_table(board.results).to_csv(index=False, float_format="%.6g"),
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


def markdown(board: Board, sweep: str, expectations: Sequence[Expectation] = ()) -> str:
    """The report of a sweep: what was run, the table per context, contrasts, mistakes, findings and whether they are as
    expected, how to read it."""
    results, table = board.results, board.table
    setup = [*setup_lines(results), *([LOOKS.format(100 * board.alpha)] if board.alpha < stats.ALPHA else [])]
    blocks = [f"# {sweep}", "\n".join(f"- {line}" for line in setup), _control_line(table)]
    for context, rows in table.groupby("context", sort=False):
        blocks += [f"## {context}"] if context else []
        blocks.append(_grid(_ARM_COLUMNS, rows))
    blocks += _base_blocks(board)
    over = improvements(board.arms, board.scores, board.control)
    if len(over):
        blocks += ["## Probability of improvement over the control, all settings", _grid(_OVER_COLUMNS, over)]
    for baseline, against in board.against.items():
        what = "no correction" if baseline == board.baselines[-1] else f"`{baseline}`"
        blocks += [f"## What changes against {what}, at the same precision"]
        blocks += [f"`{name}`: {method.summary}." for name, method in METHODS.items() if name == baseline]
        blocks.append(_grid(_CONTRAST_COLUMNS, against))
    if scores := task_scores.task_scores(results):
        blocks += ["## Evaluations on tasks", markdown_table(task_scores.HEAD, map(task_scores.cells, scores)), TASKS]
    if fallen := collapse_times.table(board.arms, board.control):
        blocks += ["## When runs collapse", fallen, collapse_times.READING]
    blocks += failures.blocks(board.arms, board.control)
    blocks += ["## What varies", _components_grid(board), COMPONENTS]
    said = [*three_sentences(table, board.baselines[-1]), *findings(table, expectations)]
    blocks += ["## In words", "\n".join(f"- {line}" for line in said)] if said else []
    if bad := [run for run in results if run.status != "ok"]:
        labels = arm_labels(results)
        lines = [f"- {labels[run.run_id]}, seed {run.seed}: {run.status}, {run.reason} (`{run.run_id}`)" for run in bad]
        blocks += ["## Runs that did not finish", "\n".join(lines)]
    shown = [row for rows in (table, *board.against.values()) for row in rows.to_dict("records")]
    told = legends(shown, BELOW, LOWER)
    reading = "\n".join(f"- {line}" for line in [*READING, *told, *_marks(table, "`{}`")])
    return "\n\n".join([*blocks, "## How to read it", reading]) + "\n"


def render_against(board: Board) -> str:
    """Text of what methods change against the corrections among the baselines; empty where there is none. The page has
    the baselines' own variants and the comparisons with no correction, too."""
    texts: list[str] = []
    for baseline, found in board.against.items():
        rows = [row for row in found.to_dict("records") if row["method"] not in board.baselines]
        if rows and baseline != board.baselines[-1]:
            cells = [[show(row) for _, show in _AGAINST_COLUMNS] for row in rows]
            table = text_table([head for head, _ in _AGAINST_COLUMNS], cells)
            texts.append(f"Against {baseline} at the same format:\n\n{table}")
    return "\n\n".join(texts)


def setup_lines(results: Sequence[RunResult]) -> list[str]:
    """Setup of the runs, from the configs: task, model, channel spread, algorithm, steps, seeds, code and machine."""
    arms = group_arms(results)

    def values(*names: str, form: Callable[..., str]) -> str:
        found = [[arm.fields.get(name) for name in names] for arm in arms]
        return ", ".join(dict.fromkeys(form(*row) for row in found if row[0] is not None))

    pairs = {(run.base_seed, run.seed) for run in results}
    lines = [
        "Task " + values("task.name", "task.n", "task.num_eval", form=_task) + "; model "
        + values("model.name", "model.num_layers", "model.hidden_size", form=_model) + "; channel spread sigma "
        + values("model.spread", form=lambda spread: f"{spread:g}")
        + values("base.n", form=lambda n: f"; bases trained at n={n}"),
        values("algo.name", form=str) + ", "
        + values("algo.num_prompts", "algo.group_size", form=lambda p, g: f"{p} prompts x {g} samples per step")
        + ", " + values("trainer.steps", form=lambda steps: f"{steps} steps")
        + f"; {len(pairs)} pairs of base seed and RL seed",
        _provenance(results),
    ]  # fmt: skip
    engines = dict.fromkeys(arm.fields.get("engine.name") for arm in arms)
    return lines + [ENGINE_NOTES[name] for name in engines if name in ENGINE_NOTES]


def render_terminal(board: pd.DataFrame, baseline: str = BASELINES[-1]) -> str:
    """The leaderboard as text of at most WIDTH columns: two groups of columns, a legend, and what it says in words."""
    lines: list[str] = []
    has_deployed = bool((board["deployed_verdict"] != "not declared").any())
    columns = _TERMINAL_COLUMNS + _DEPLOYED_COLUMNS * has_deployed
    width = WIDTH - sum(width + 1 for _, width, _ in columns)
    names = [_arm_name(row) for row in board.to_dict("records")]
    width = min(width, max(map(len, names), default=0))
    groups = "BF16 policy".ljust(sum(size + 1 for _, size, _ in _TERMINAL_COLUMNS[1:]))
    over = " " * (width + 8) + groups + "as deployed" * has_deployed
    for context, rows in board.groupby("context", sort=False):
        lines += ["", f"{context}"] if context else []
        lines += [over.rstrip(), " ".join(["arm".ljust(width), *(head.ljust(size) for head, size, _ in columns)])]
        lines[-1] = lines[-1].rstrip()
        lines.append("─" * max(map(len, lines[-2:])))
        for row in rows.to_dict("records"):
            name = _arm_name(row)
            if len(name) > width:  # whole, above its numbers: an end cut off may be all that differs
                lines += wrap(name, WIDTH, break_on_hyphens=False)
                name = ""
            cells = [show(row)[:size].ljust(size) for _, size, show in columns]
            lines.append(" ".join([name.ljust(width), *cells]).rstrip())
    rows = board.to_dict("records")
    told = legends(rows, BELOW_ON, LOWER_ON)
    told += [NO_CONTROL] * any(row[f"{prefix}verdict"] == "no control" for row in rows for prefix in PREFIXES.values())
    lines += ["", _control_line(board), *LEGEND, *told, *_marks(board), ""]
    lines += [part for said in three_sentences(board, baseline) for part in wrap(said, WIDTH)]
    return "\n".join(lines).strip("\n")


def _base_blocks(board: Board) -> list[str]:
    """The section on single bases, a table per context; nothing where no two runs share arm and base."""
    blocks: list[str] = []
    for context in dict.fromkeys(label(arm.context) for arm, _ in board.on_bases):
        inside = [(arm, by_base) for arm, by_base in board.on_bases if label(arm.context) == context]
        bases = sorted({base for _, by_base in inside for base in by_base})
        rows = [[arm.label, *(_on_base(by_base.get(base)) for base in bases)] for arm, by_base in inside]
        blocks += [f"### {context}"] * bool(context)
        blocks.append(markdown_table(["arm", *base_names(bases)], rows, align="lr"))
    return ["## Base by base", *blocks, ON_BASES] if blocks else []


def _on_base(found: stats.BaseDifference | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:+.3f}" + (f" {found.word}" if found.word != "open" else "")


def _components_grid(board: Board) -> str:
    """The standard deviations of base, run and evaluation, a row per context and endpoint."""
    rows: list[dict[str, Any]] = []
    for context in dict.fromkeys(label(arm.context) for arm in board.arms):
        inside = {arm.label: board.scores[arm.label] for arm in board.arms if label(arm.context) == context}
        for endpoint in ENDPOINTS:
            found = components(inside, endpoint)
            values = {"base": found.base, "run": found.run, "evaluation": found.evaluation}
            words = "replicates" if found.has_replicates else "no replicates: run has arm by base in it"
            rows.append({"context": context, "endpoint": endpoint, "from": words, **values})
    return _grid(_COMPONENT_COLUMNS, pd.DataFrame(rows))


def _control_line(board: pd.DataFrame) -> str:
    controls = dict.fromkeys(row["control"] for row in board.to_dict("records") if row["control"])
    return f"Control: {', '.join(controls) or 'none in this table'}."


def _arm_name(row: Row) -> str:
    """Method, precision and variant with the marks; the context stands above the table."""
    marks = "".join(mark for column, (mark, _) in MARKS.items() if row[column])
    return " ".join(filter(None, [row["method"], row["precision"], row["variant"]])) + marks


def _marks(board: pd.DataFrame, form: str = "{}") -> list[str]:
    """The marks in use; Markdown quotes them, since a star at the start of a line makes a list there."""
    return [f"{form.format(mark)} {text}" for column, (mark, text) in MARKS.items() if any(board[column])]


def interval_cell(name: str, form: str = ".3f") -> Callable[[Row], str]:
    """`0.521 [0.45, 0.59]` of a row; the mean alone where it has no interval."""
    return lambda row: with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"], form, ".2f")


def _short_difference(row: Row) -> str:
    """`+0.021±.070`, with the interval's wider side."""
    mean, low, high = row["difference"], row["difference_low"], row["difference_high"]
    if math.isnan(low):
        return number_cell(mean, "+.3f")
    return f"{mean:+.3f}±{max(high - mean, mean - low):.3f}".replace("±0.", "±.")


def difference_cell(prefix: str = "") -> Callable[[Row], str]:
    """`+0.021 [-0.05, +0.09]` of a row; the mean alone where it has no interval."""
    name = f"{prefix}difference"
    return lambda row: with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"], "+.3f", "+.2f")


def _verdict(prefix: str = "") -> Callable[[Row], str]:
    return lambda row: verdict_words(row, prefix)


def _seeds(row: Row) -> str:
    """Number of scored runs of all runs, as text."""
    total = sum(row[status] for status in STATUSES)
    return f"{row['seeds']}" if row["ok"] == total else f"{row['seeds']}/{total}"


def _largest_k3(row: Row) -> str:
    return number_cell(row["k3_max"], ".2g" if 1e-4 <= abs(row["k3_max"]) < 100 else ".0e")


def _grid(columns: Iterable[tuple[str, Callable[[Row], str]]], rows: pd.DataFrame) -> str:
    """A Markdown table; the first column is text, the others align right."""
    columns = list(columns)
    cells = ([show(row) for _, show in columns] for row in rows.to_dict("records"))
    return markdown_table([head for head, _ in columns], cells, align="lr")


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
    ("effective bits", lambda row: number_cell(row["effective_bits"], ".2f")),
    ("accuracy, reference", interval_cell("accuracy")),
    ("AUC", interval_cell("auc")),
    ("difference to control", difference_cell()),
    ("verdict", _verdict()),
    ("collapsed", lambda row: row["collapse"]),
    ("AUC as deployed", interval_cell("deployed_auc")),
    ("difference as deployed", difference_cell("deployed_")),
    ("verdict as deployed", _verdict("deployed_")),
    ("collapsed as deployed", lambda row: row["deployed_collapse"]),
    ("ranked by", lambda row: row["endpoint"]),
    ("P(better)", interval_cell("improvement", ".2f")),
    ("sampler reward", interval_cell("reward")),
    ("max k3, nats", _largest_k3),
    ("raw ESS", lambda row: number_cell(row["ess_token_raw"], ".2f")),
    ("entropy, nats", lambda row: number_cell(row["entropy_last"], ".2f")),
    ("runs", lambda row: row["status"]),
)
_CONTRAST_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: row["arm"]),
    ("against", lambda row: row["control"]),
    ("pairs", lambda row: str(row["pairs"])),
    ("AUC difference", difference_cell()),
    ("verdict", _verdict()),
    ("collapsed", lambda row: row["collapse"]),
    ("difference as deployed", difference_cell("deployed_")),
    ("verdict as deployed", _verdict("deployed_")),
)
_AGAINST_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: row["arm"]),
    ("pairs", lambda row: str(row["pairs"])),
    ("BF16 policy", difference_cell()),
    ("verdict", short_verdict()),
    ("as deployed", difference_cell("deployed_")),
    ("verdict as deployed", short_verdict("deployed_")),
)
_OVER_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: row["arm"]),
    ("settings", lambda row: str(row["settings"])),
    ("runs", lambda row: str(row["runs"])),
    ("P(better)", interval_cell("improvement", ".2f")),
)
_COMPONENT_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("setting", lambda row: row["context"] or "all"),
    ("endpoint", lambda row: row["endpoint"]),
    ("base", lambda row: number_cell(row["base"])),
    ("run", lambda row: number_cell(row["run"])),
    ("evaluation", lambda row: number_cell(row["evaluation"])),
    ("run from", lambda row: row["from"]),
)
COMPONENTS = (
    "Standard deviations of the mean accuracy after step 0, over the arms of which no run collapsed: between bases "
    "(shared by all arms), between runs on a base, and of a run's evaluation on its questions."
)
ON_BASES = (
    "What an arm does to the BF16 policy on one base, minus the control's runs there. Runs that share arm and base say "
    f"how noisy a run is. Lower or higher: the interval lies beyond ±{stats.DELTA:g}; equal: within it; no word: "
    "neither. At most 5 % of these words are expected to be wrong, as long as the other arms' runs are not much "
    "noisier than those that were repeated. They are about these bases; a verdict above is about the next one."
)
_TERMINAL_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("seeds", 6, _seeds),
    ("AUC", 8, lambda row: number_cell(row["auc"])),
    ("to control", 11, _short_difference),
    ("verdict", VERDICT_WIDTH, short_verdict()),
)
_DEPLOYED_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("AUC", 8, lambda row: number_cell(row["deployed_auc"])),
    ("verdict", VERDICT_WIDTH, short_verdict("deployed_")),
)
"""(heading, columns, cell)."""
NO_CONTROL = "no control: no run of the control has these settings on one of the arm's bases."
LEGEND = (
    "AUC: mean accuracy of the evaluations after step 0.  BF16 policy: the trained weights answer without",
    "rounding; as deployed: in the arm's format.  ±: the interval that decides, the wider side.",
    f"worse, better: the interval excludes 0.  equal: it lies within ±{stats.DELTA:g}.",
    "(+n): with n more seeds the chance of a verdict is 80 %, if they vary as these do.",
    "falls x/n: so many runs collapsed (then the others' verdict).  falls ≤x%: no run did; 95 % bound.",
    "no signal: the arm or its control never left its start, or both sit at 0.",
)
