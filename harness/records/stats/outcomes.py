"""Outcomes of the runs of an arm, and the kind of verdict that it allows.

better, equal, worse   the runs that did not collapse differ so from those of the control (`decisions.decide`)
cannot tell            they do not show
collapses in x of n    some runs fell apart and some did not; what the others show follows
no signal              an arm or its control never left its start, or both sit at 0: nothing was measured
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records.stats.collapse import Rate, is_collapsed, rate
from harness.records.stats.decisions import ALPHA, Contrast, Decision, decide
from harness.records.stats.replicates import Key, contrast

COLLAPSES, NO_SIGNAL = "collapses", "no signal"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run at one endpoint, as accuracies in [0, 1]."""

    value: float
    """Number that is compared: the mean of the evaluations after the start."""
    start: float
    """NaN where it was not measured."""
    end: float
    has_moved: bool
    """False where every evaluation is what the start was."""
    has_diverged: bool = False

    @property
    def has_collapsed(self) -> bool:
        """Did it fall apart?"""
        return is_collapsed(self.start, self.end, self.has_diverged)


Outcomes = Mapping[Key, Outcome]
"""(base, run seed) -> outcome."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on an arm, in words, with what it rests on."""

    verdict: str
    rate: Rate
    """Rate of collapse, over all runs of the arm."""
    contrast: Contrast | None
    """Over the runs that did not collapse (over all where all did); None without a comparison."""
    decision: Decision | None


def outcome(curve: Sequence[float], start: float, has_diverged: bool = False, is_frozen: bool = False) -> Outcome:
    """A run from its evaluations after the start. `is_frozen`: not one answer changed.

    Raises ValueError for no evaluation.
    """
    if not curve:
        raise ValueError("curve=[]: an outcome needs an evaluation after the start")
    return Outcome(
        value=sum(curve) / len(curve), start=start, end=curve[-1], has_moved=not is_frozen, has_diverged=has_diverged
    )


def collapse_rate(runs: Outcomes) -> Rate:
    """Rate of collapse of these runs."""
    return rate(sum(run.has_collapsed for run in runs.values()), len(runs))


def has_signal(arm: Outcomes, control: Outcomes) -> bool:
    """Is there anything to compare: did some run of each leave its start, and is not every run of both at 0?"""
    moved = all(any(run.has_moved for run in runs.values()) for runs in (arm, control))
    return moved and any(run.value > 0 for runs in (arm, control) for run in runs.values())


def judge(pairs: Sequence[tuple[Outcomes, Outcomes]], alpha: float = ALPHA) -> list[Judged]:
    """The verdicts on the (arm, control) pairs of one setting, decided together at the level `alpha`."""
    compared = [_compared(arm, control) for arm, control in pairs]
    decisions = iter(decide([found for found in compared if found is not None], alpha=alpha))
    return [
        _judged(collapse_rate(arm), found, None if found is None else next(decisions))
        for (arm, _), found in zip(pairs, compared, strict=True)
    ]


def _compared(arm: Outcomes, control: Outcomes) -> Contrast | None:
    if not has_signal(arm, control):
        return None
    is_mixed = 0 < collapse_rate(arm).count < len(arm)
    return contrast(_settled(arm), _settled(control), can_pool=not is_mixed)


def _settled(runs: Outcomes) -> dict[Key, float]:
    """The values of the runs that did not collapse, or of all where all did."""
    standing = {key: run.value for key, run in runs.items() if not run.has_collapsed}
    return standing or {key: run.value for key, run in runs.items()}


def _judged(collapses: Rate, found: Contrast | None, decision: Decision | None) -> Judged:
    if found is None or decision is None:
        return Judged(verdict=NO_SIGNAL, rate=collapses, contrast=None, decision=None)
    words: str = decision.verdict
    if 0 < collapses.count < collapses.total:
        words = f"{COLLAPSES} in {collapses.count} of {collapses.total}"
        words += "" if decision.verdict == "cannot tell" else f", else {decision.verdict}"
    return Judged(verdict=words, rate=collapses, contrast=found, decision=decision)


def kind(verdict: str) -> str:
    """The kind of a verdict in words: the part that does not depend on counts."""
    return COLLAPSES if verdict.startswith(COLLAPSES) else verdict


def is_decided(verdict: str) -> bool:
    """Does the verdict say something about the arm?"""
    return kind(verdict) in ("better", "equal", "worse", COLLAPSES)


def difference(judged: Judged) -> tuple[float, float, float]:
    """(mean, low, high) of the interval that decides; NaN without a comparison."""
    if judged.contrast is None or judged.decision is None:
        return math.nan, math.nan, math.nan
    return judged.contrast.mean, judged.decision.low, judged.decision.high
