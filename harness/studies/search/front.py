"""The Pareto front: feasible trials that no other feasible trial beats in one objective and matches in the others."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from harness.studies.search.confirm import is_feasible
from harness.studies.search.pruning import oriented
from harness.studies.search.spec import Search


def on_front(search: Search, trials: Sequence[FrozenTrial], numbers: Sequence[int] | None = None) -> list[FrozenTrial]:
    """The feasible trials that no other dominates, in all objectives or in those with `numbers`; equal ones stay."""
    chosen = range(len(search.objectives)) if numbers is None else numbers
    feasible = [trial for trial in trials if is_feasible(trial)]
    if not feasible:
        return []
    points = [[oriented(t.values[i], search.objectives[i]) for i in chosen] for t in feasible]
    return [trial for trial, mine in zip(feasible, points, strict=True) if not any(beats(p, mine) for p in points)]


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Is `one` at least as large everywhere and larger somewhere?"""
    return all(a >= b for a, b in zip(one, other, strict=True)) and list(one) != list(other)
