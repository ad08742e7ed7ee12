"""Findings of a search as files: a table with a sentence per share, and every trial as JSON, from what is stored."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna import Study
from optuna.trial import TrialState

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import with_interval
from harness.foundation.whole_file import write_atomic
from harness.records.paths import searches_folder, tables_folder
from harness.records.run_result import RunResult
from harness.records.stats import DELTA, MOST, Difference, Verdict, paired, units_to_decide, verdict
from harness.studies.search.confirm import (
    Contender,
    Trials,
    best_found,
    compared,
    confirmed,
    contenders,
    fresh_scores,
    searched_lead,
    values_of,
)
from harness.studies.search.pruning import oriented
from harness.studies.search.space import cell_of, text
from harness.studies.search.spec import ACCURACIES, Objective, Search
from harness.studies.search.store import open_studies
from harness.studies.search.trials import complete_trials, has_failed, is_feasible, metrics_of

NUM_SHOWN = 10
"""Best trials that the table lists per share."""


def write_tables(search: Search, results: Path) -> list[Path]:
    """Write `tables/<name>.md` and `searches/<name>.json`: their paths."""
    studies = open_studies(search, results, is_writing=False)
    trials = {share: study.get_trials(deepcopy=False) for share, study in studies.items()}
    found = contenders(search, trials)
    records = confirmed(search, found, Launch(results=str(results), sweep=search.name))
    table, whole = tables_folder(results) / f"{search.name}.md", searches_folder(results) / f"{search.name}.json"
    sections = [
        f"# {search.name}", *answers(search, trials, found, records), search.question,
        *fresh_section(search, found, records), *trials_section(search, studies), *spent_section(search, trials),
    ]  # fmt: skip
    write_atomic(table, ("\n\n".join(sections) + "\n").encode())
    write_atomic(whole, (json.dumps(exported(search, trials, found), indent=1, sort_keys=True) + "\n").encode())
    return [table, whole]


def answers(
    search: Search, trials: Trials, found: Sequence[Contender], records: Mapping[str, Mapping[int, RunResult]]
) -> list[str]:
    """One sentence per share: does the best differ from its baseline on fresh seeds, and how lucky was it?"""
    said = [_answer(search, share, trials, found, records) for share in trials]
    return ["\n".join(f"* {line}" for line in said)]


def _answer(
    search: Search, share: str, trials: Trials, found: Sequence[Contender],
    records: Mapping[str, Mapping[int, RunResult]],
) -> str:  # fmt: skip
    first, where = search.objectives[0], f"{share}: " if share else ""
    best = best_found(search, trials[share])
    base = compared_with(share, found)
    own = [t for t in trials[share] if "baseline" not in t.user_attrs]
    if best is None:
        ended = sum(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in own)
        return f"{where}none of {ended} trials beside the baselines was complete and within the constraint."
    tied = sum(is_feasible(t) and t.values[0] == best.values[0] for t in own)
    shown = f"trial {best.number} ({knobs_text(values_of(best), search)})" + f", one of {tied} that tie" * (tied > 1)
    if base is None:
        return f"{where}the best found is {shown}; there is no baseline to compare it with."
    contender = next(c for c in found if c.share == share and c.number == best.number)
    if base.name == contender.name:
        return f"{where}the best found is {shown}; the others are compared with it."
    d = compared(records[contender.name], records[base.name], first)
    beside = ""
    if base.kind == "baseline":
        lead = searched_lead(best, next(t for t in trials[base.share] if t.number == base.number), first)
        is_known = math.isfinite(lead)
        told = f"it was {_difference(lead, math.nan, math.nan, first)}" if is_known else "the baseline was given up"
        beside = f" In the search {told}."
    for one in (contender, base):
        lost = sum(result.status != "ok" for result in records[one.name].values())
        beside += f" {lost} of {len(records[one.name])} fresh runs of {one.name} did not end well." if lost else ""
    if math.isnan(d.low):
        return f"{where}the best found is {shown}. Its {first.metric} against {base.name} is not confirmed.{beside}"
    more = units_to_decide(d.mean, d.sd, d.num_pairs, d.num_pairs - 1, margin=search.margin)
    assert more is not None, "an interval has an s.d."
    further = f"{more:.0f} more seed{'s' * (more != 1)}" if math.isfinite(more) else f"more than {MOST} more"
    said = {
        "equal": f"they do not differ by as much as {'a factor of ' * first.log}{search.confirm.margin or DELTA:g}",
        "better": "it is better",
        "worse": "it is worse",
        "cannot tell": f"which does not tell them apart ({further} would with a chance of 80 %)",
    }[_verdict(d, search)]
    return (
        f"{where}the best found is {shown}. On {d.num_pairs} fresh seeds its {first.metric} is "
        f"{_difference(d.mean, d.low, d.high, first)} against {base.name}: {said}.{beside}"
    )


def _difference(mean: float, low: float, high: float, objective: Objective) -> str:
    """A difference of `scaled` values as text: a factor where the objective compares logarithms, thousandths of an
    accuracy, three digits of anything else. Without an interval (NaN) the number alone."""
    if objective.log:
        return f"x{_cell(mean, low, high, '.3g', is_log=True)}"
    return _cell(mean, low, high, "+.3f" if objective.metric in ACCURACIES else "+.3g", is_log=False)


def _cell(mean: float, low: float, high: float, form: str, is_log: bool) -> str:
    """`scaled` numbers in their own unit."""
    if is_log:
        with np.errstate(over="ignore"):  # a value of 0 counts as 1e-300
            mean, low, high = np.exp((mean, low, high)).tolist()
    return with_interval(mean, low, high, form)


def compared_with(share: str, found: Sequence[Contender]) -> Contender | None:
    """A share's contender to compare with: its baseline, else the first baseline, else the first share's best."""
    bases = [c for c in found if c.kind == "baseline"]
    own = [c for c in bases if c.share == share]
    return next(iter([*own, *bases, *(c for c in found if c.kind == "best")]), None)


def fresh_section(
    search: Search, found: Sequence[Contender], records: Mapping[str, Mapping[int, RunResult]]
) -> list[str]:
    """Every contender on the fresh seeds."""
    if not search.confirm.seeds:
        return []
    metrics = metrics_of(search)
    has_baseline = any(c.kind == "baseline" for c in found)
    other = "its baseline" if has_baseline or not found else found[0].name
    names = [_mean_name(search, metric) for metric in metrics]
    head = ["", "trial", *names, f"{metrics[0]} against {other}", "ended well"]
    rows = list[list[str]]()
    for contender in found:
        base = compared_with(contender.share, found)
        gap = _gap(contender, base, records, search)
        mine = records[contender.name]
        number = "" if contender.number is None else str(contender.number)
        ended = f"{sum(r.status == 'ok' for r in mine.values())} of {len(search.confirm.seeds)}"
        rows.append([contender.name, number, *(_mean(mine, metric, search) for metric in metrics), gap, ended])
    return [
        f"## On seeds {list(search.confirm.seeds)}, which no trial had: mean and 95 % interval",
        markdown_table(head, rows),
    ]


def _mean_name(search: Search, metric: str) -> str:
    """Heading of a column of means."""
    return f"{metric}, geometric" if search.is_log(metric) else metric


def _mean(records: Mapping[int, RunResult], metric: str, search: Search) -> str:
    scores = fresh_scores(records, metric, search.is_log(metric))
    if not scores:
        return "-"
    d = paired(scores, dict.fromkeys(scores, 0.0))
    return _cell(d.mean, d.low, d.high, ".4g", search.is_log(metric))


def _gap(
    contender: Contender, base: Contender | None, records: Mapping[str, Mapping[int, RunResult]], search: Search
) -> str:
    if base is None or base.name == contender.name:
        return ""
    first = search.objectives[0]
    d = compared(records[contender.name], records[base.name], first)
    return "-" if math.isnan(d.low) else f"{_difference(d.mean, d.low, d.high, first)} ({_verdict(d, search)})"


def _verdict(d: Difference, search: Search) -> Verdict:
    """Verdict on a difference of the first objective: a lower one is better where it is minimized."""
    low, high = (d.low, d.high) if search.objectives[0].direction == "maximize" else (-d.high, -d.low)
    return verdict(low, high, search.margin)


def trials_section(search: Search, studies: Mapping[str, Study]) -> list[str]:
    """The best trials of every share by the first objective, and which of them no other beats in everything."""
    names = [_mean_name(search, o.metric) for o in search.objectives]
    sections: list[str] = []
    for share, study in studies.items():
        front = {t.number for t in study.best_trials}
        ranked = sorted(complete_trials(study), key=lambda t: -oriented(t.values[0], search.objectives[0]))
        chosen = ranked[:NUM_SHOWN] + [t for t in ranked[NUM_SHOWN:] if "baseline" in t.user_attrs]
        head = ["trial", "knobs", *names, "feasible", "front", "baseline"]
        rows = list[list[str]]()
        for t in chosen:
            flags = ["yes" if is_feasible(t) else "no", "yes" if t.number in front else ""]
            values = [f"{value:.4g}" for value in t.values]
            knobs = knobs_text(values_of(t), search)
            rows.append([str(t.number), knobs, *values, *flags, str(t.user_attrs.get("baseline", ""))])
        title = f"## Best trials {'of ' + share if share else ''}".rstrip() + f": mean of seeds {list(search.seeds)}"
        sections += [title, markdown_table(head, rows)]
    return sections


def spent_section(search: Search, trials: Trials) -> list[str]:
    """Table of what the search spent, and why trials were given up."""
    head = ["share", "complete", "pruned", "failed", "cells", "core-hours"]
    rows = list[list[str]]()
    reasons: Counter[str] = Counter()
    for share, of_share in trials.items():
        states = Counter(t.state for t in of_share)
        own = sum(map(has_failed, of_share))
        cells = sum(len(t.user_attrs.get("cells", {})) for t in of_share)
        hours = sum(float(t.user_attrs.get("cost_s", 0.0)) for t in of_share) / 3600
        rows.append([share or "all", str(states[TrialState.COMPLETE]), str(states[TrialState.PRUNED]), str(own),
                     str(cells), f"{hours:.2f}"])  # fmt: skip
        reasons.update(_kind(t.user_attrs["reason"]) for t in of_share if t.state == TrialState.PRUNED)
    why = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
    bound = search.constraint
    said = "" if bound is None else f" Constraint: {bound.metric} at most {bound.at_most:g}, mean over seeds."
    return ["## Spent", markdown_table(head, rows), (f"Given up: {why}." if why else "No trial was given up.") + said]


def _kind(reason: str) -> str:
    """Rule that gave a trial up."""
    for words, kind in (
        ("behind the best", "it was behind the best trial"),
        ("reward fell", "the reward of a cell fell"),
        ("rank", "the reward of a cell was among the lowest"),
        ("is number", "other trials of their share did better on the same seeds"),
    ):
        if words in reason:
            return kind
    return "a cell diverged"


def knobs_text(values: Mapping[str, Any], search: Search) -> str:
    """Knobs without what they all share: the beginnings of their names and the knob of the share."""
    kept = {name: value for name, value in values.items() if name != search.budget.per}
    return ", ".join(f"{name.rpartition('.')[2]} {text(value)}" for name, value in kept.items())


def exported(search: Search, trials: Trials, found: Sequence[Contender]) -> dict[str, Any]:
    """Every trial, and every cell with the trials it belongs to, as plain JSON."""
    rows = [
        {
            "share": share, "number": t.number, "state": t.state.name.lower(), "knobs": values_of(t),
            "values": t.values, "reason": t.user_attrs.get("reason", ""), "scores": t.user_attrs.get("scores", {}),
            "cells": t.user_attrs.get("cells", {}), "cost_s": t.user_attrs.get("cost_s", 0.0),
            "baseline": t.user_attrs.get("baseline"), "is_feasible": is_feasible(t),
        }
        for share, of_share in trials.items()
        for t in of_share
        if t.state.is_finished()
    ]  # fmt: skip
    again = {
        c.name: {str(seed): run_id(cell_of(list(c.overrides), seed)) for seed in search.confirm.seeds} for c in found
    }
    return {"name": search.name, "trials": rows, "confirmation": again}
