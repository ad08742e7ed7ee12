"""`lowbit runs`: the runs of a sweep by name, or the sweeps that have results. `lowbit passport NAME` opens one."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from harness.cli.options import add_results, always, never
from harness.foundation.number_cell import number_cell
from harness.foundation.text_table import text_table

LEGEND = """\
AUC: mean accuracy of the evaluations after step 0.  accuracy: after the last step.  Both: of the BF16 policy.
base, seed: of the base model, of the run.  date: when the run ended (UTC).  -: nothing was measured.
lowbit passport NAME (or ID, where several runs share a name) shows the formats of a run."""

ASKED = """\
Scores of `evaluations` after the last step at which they were asked, over seeds and questions (95 %).
reference: in BF16 on vLLM, in float32 on the embedded engine.  rollout: as rolled."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sweep", nargs="?", help="list the runs of this sweep (default: the sweeps that have results)")
    add_results(parser, reads=always, writes=never)


def run(a: argparse.Namespace) -> int:
    """Print one of the two tables. Raises ValueError for a sweep without results, and where none has any."""
    from harness.records.folder import check_sweep, some_sweeps

    if a.sweep is not None:
        check_sweep(a.results, a.sweep)
        print(runs_table(a.results, a.sweep))
    else:
        print(sweeps_table(a.results, some_sweeps(a.results)))
    return 0


def sweeps_table(results: Path, sweeps: list[str]) -> str:
    """A row per sweep: its arms, runs, statuses and the date of its newest run."""
    from harness.records.arms import group_arms
    from harness.records.folder import runs_of

    rows: list[tuple[str, ...]] = []
    for sweep in sweeps:
        runs, problems = runs_of(results, sweep)
        count = Counter(run.status for run in runs)
        status = ", ".join(
            [f"{count[name]} {name}" for name in count] + [f"{len(problems)} unreadable"] * bool(problems)
        )
        newest = max((run.ended_at or "" for run in runs), default="")[:10] or "-"
        rows.append((sweep, str(len(group_arms(runs))), str(len(runs)), status, newest))
    head = ("sweep", "arms", "runs", "status", "newest run")
    legend = "An arm is runs that differ in their seeds alone. lowbit runs SWEEP lists the runs."
    return f"{text_table(head, rows)}\n\n{legend}"


def runs_table(results: Path, sweep: str) -> str:
    """A row per run, arm by arm, with a legend, the scores of `evaluations` where there are any, and a line per file
    that is no result."""
    from harness.records.arms import group_arms
    from harness.records.folder import runs_of
    from harness.report.task_scores import HEAD, cells, task_scores

    runs, problems = runs_of(results, sweep)
    arms = group_arms(runs)
    head = ("arm, and its runs by name", "base", "seed", "status", "AUC", "accuracy", "date", "id")
    rows: list[tuple[str, ...]] = []
    for arm in arms:
        rows.append((arm.label, *[""] * (len(head) - 1)))
        rows += [
            (f"  {run.name}", str(run.base_seed), str(run.seed), run.status, number_cell(run.summary.get("auc")),
             number_cell(run.summary.get("final_accuracy")), (run.ended_at or "-")[:10], run.run_id)
            for run in arm.runs
        ]  # fmt: skip
    scores = [cells(row) for row in task_scores(runs)]
    asked = f"\n\n{text_table(HEAD, scores)}\n\n{ASKED}" if scores else ""
    left = "".join(f"\nleft alone: {problem}" for problem in problems)
    return f"{text_table(head, rows)}\n\n{LEGEND}{asked}{left}"
