"""Tables of how answers fail, and of how many prompts one answer of a group solves.

Answers that fail are those to the training task's held-out questions in the reference precision, groups those of the
last training steps as sampled. A run's shares are averaged over a base's runs, then over bases. Left out: tasks that
classify no mistakes, and runs that did not record their groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from harness.foundation.markdown_table import markdown_table
from harness.records.arms import Arm, control_of, label
from harness.records.run_result import Base, RunResult
from harness.records.statuses import FINISHED

ByBase = dict[Base, Counter[str]]
"""Base seed -> means over its runs: a number by name."""
LENGTH, BEST = "tokens", "best of a group"
MEANS = (
    "Means over bases, of a base's runs first; in brackets the difference to the control on the same bases, without an "
    "interval."
)
READING = (
    "Share of the answers by the first mistake on their way, after the last step, in the reference precision; the "
    "documentation of the task defines the classes. An answer with a mistake may state the right number all the same. "
    f"Tokens: mean length. {MEANS}"
)
BEST_READING = (
    "Share of the training prompts that at least one response of their group solves (pass@k, k being the group's "
    "size), in the rollout format, over the last twenty steps. Dynamic sampling leaves only prompts that some response "
    f"solves. Runs that did not record it are left out. {MEANS}"
)


def blocks(arms: Sequence[Arm], control: str) -> list[str]:
    """The sections as Markdown; without one that no run tells."""
    failed, best = _tables(arms, control, failures_of), _tables(arms, control, best_of)
    return [
        *(["## How answers fail", *failed, READING] if failed else []),
        *(["## How many prompts a group solves", *best, BEST_READING] if best else []),
    ]


def _tables(arms: Sequence[Arm], control: str, numbers: Callable[[RunResult], Counter[str] | None]) -> list[str]:
    """A table per context, all with the same columns: arms beside their control."""
    means = {arm.label: known for arm in arms if (known := by_base(arm, numbers))}
    total = sum((shares for known in means.values() for shares in known.values()), Counter[str]())
    names = sorted((name for name, _ in total.most_common()), key=lambda name: name != LENGTH)
    found: list[str] = []
    for context in dict.fromkeys(label(arm.context) for arm in arms):
        rows: list[list[str]] = []
        for arm in (arm for arm in arms if label(arm.context) == context):
            if own := means.get(arm.label):
                against = control_of(arm, arms, control)
                other = {} if against is None or against is arm else means.get(against.label, {})
                cells = [_cell(own, other, name, ".0f" if name == LENGTH else ".3f") for name in names]
                rows.append([arm.label, str(len(own)), *cells])
        if rows:
            found += [f"### {context}"] * bool(context)
            found.append(markdown_table(["arm", "bases", *names], rows, align="lr"))
    return found


def by_base(arm: Arm, numbers: Callable[[RunResult], Counter[str] | None]) -> ByBase:
    """Means over the finished runs of each base; without those that have no `numbers`."""
    groups: dict[Base, list[Counter[str]]] = {}
    for run in arm.runs:
        if run.status in FINISHED and (own := numbers(run)) is not None:
            groups.setdefault(run.base, []).append(own)
    return {base: _mean(runs) for base, runs in groups.items()}


def failures_of(run: RunResult) -> Counter[str] | None:
    """Share of the last answers in the reference precision by class of mistake, and their length in tokens; None where
    no evaluation tells how answers fail."""
    records = [record for record in run.evals if record.site == "reference"]
    if not any(record.failures for record in records):
        return None
    last = max(records, key=lambda record: record.step)
    return Counter({**last.failures, LENGTH: last.length_mean or 0.0})


def best_of(run: RunResult) -> Counter[str] | None:
    """Share of the last prompts that a group solves; None where the run did not record it."""
    best = run.summary.get("best_of_group_last")
    return None if best is None else Counter({BEST: best})


def _mean(runs: Sequence[Counter[str]]) -> Counter[str]:
    return Counter({name: fmean(run[name] for run in runs) for name in {name for run in runs for name in run}})


def _cell(own: ByBase, other: ByBase, name: str, form: str) -> str:
    common = own.keys() & other.keys()
    value = f"{fmean(shares[name] for shares in own.values()):{form}}"
    return value + (f" ({fmean(own[base][name] - other[base][name] for base in common):+{form}})" if common else "")
