"""Table of how answers fail: the share of every arm's last answers by their first mistake, and their length.

Answers are those to the training task's held-out questions in the reference precision. A run's shares are averaged over
a base's runs, then over bases. Left out: tasks that classify no mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from harness.foundation.markdown_table import markdown_table
from harness.records.arms import Arm, control_of, label
from harness.records.run_result import Base, EvalRecord, RunResult
from harness.records.statuses import FINISHED

ByBase = dict[Base, Counter[str]]
"""Base seed -> means over its runs: share of the answers by class of mistake, and `LENGTH`."""
LENGTH = "tokens"
READING = (
    "Share of the answers by the first mistake on their way, after the last step, in the reference precision; the "
    "documentation of the task defines the classes. An answer with a mistake may state the right number all the same. "
    "Tokens: mean length. Means over bases, of a base's runs first; in brackets the difference to the control on the "
    "same bases, without an interval."
)


def blocks(arms: Sequence[Arm], control: str) -> list[str]:
    """The section as Markdown, a table per context, all with the same columns; empty where no run tells how its answers
    fail."""
    means = {arm.label: known for arm in arms if (known := by_base(arm))}
    total = sum((shares for known in means.values() for shares in known.values()), Counter[str]())
    classes = [name for name, _ in total.most_common() if name != LENGTH]
    found: list[str] = []
    for context in dict.fromkeys(label(arm.context) for arm in arms):
        rows: list[list[str]] = []
        for arm in (arm for arm in arms if label(arm.context) == context):
            if own := means.get(arm.label):
                against = control_of(arm, arms, control)
                other = {} if against is None or against is arm else means.get(against.label, {})
                cells = [_cell(own, other, name, ".3f") for name in classes]
                rows.append([arm.label, str(len(own)), _cell(own, other, LENGTH, ".0f"), *cells])
        if rows:
            found += [f"### {context}"] * bool(context)
            found.append(markdown_table(["arm", "bases", LENGTH, *classes], rows, align="lr"))
    return ["## How answers fail", *found, READING] if found else []


def by_base(arm: Arm) -> ByBase:
    """Means over the runs of each base; without those that do not tell."""
    groups: dict[Base, list[Counter[str]]] = {}
    for run in arm.runs:
        if (record := _last(run)) is not None:
            shares = Counter({**record.failures, LENGTH: record.length_mean or 0.0})
            groups.setdefault(run.base, []).append(shares)
    return {base: _mean(runs) for base, runs in groups.items()}


def _last(run: RunResult) -> EvalRecord | None:
    """The last evaluation of a finished run in the reference precision, if its evaluations tell how answers fail."""
    records = [record for record in run.evals if record.site == "reference"]
    tells = run.status in FINISHED and any(record.failures for record in records)
    return max(records, key=lambda record: record.step) if tells else None


def _mean(runs: Sequence[Counter[str]]) -> Counter[str]:
    return Counter({name: fmean(run[name] for run in runs) for name in {name for run in runs for name in run}})


def _cell(own: ByBase, other: ByBase, name: str, form: str) -> str:
    common = own.keys() & other.keys()
    value = f"{fmean(shares[name] for shares in own.values()):{form}}"
    return value + (f" ({fmean(own[base][name] - other[base][name] for base in common):+{form}})" if common else "")
