"""Table of when runs collapse: every arm's falls beside those of its control, with a log-rank test of paired runs.

A pair is a base, a run seed and the same questions. Rows are the arms of which, or of whose control, a paired run
collapsed; the policy is the one in the reference precision. Left out: the curves themselves, which the figures draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.foundation.markdown_table import markdown_table
from harness.foundation.number_cell import number_cell
from harness.records import stats
from harness.records.arms import Arm, control_of, label, scored
from harness.records.run_result import RunResult
from harness.report.scores import answered_steps, answers, by_pair

HEAD = ("arm", "against", "pairs", "collapsed, at step", "of the control", "more than expected", "p", "p of all")
READING = (
    "A run collapses at the first evaluation from which on it stays below half of the accuracy it started from. More "
    "than expected: falls of the arm beyond those that it would have if both fell at one rate. p: the log-rank test "
    "over all exchanges of arm and control within pairs, which is exact. p of all: after Holm's correction over the "
    "arms of a setting; - where so few runs were paired, or fell, that no outcome would have had a p of 0.05."
)
TESTABLE = 0.05
"""Largest `least_p` of an arm that counts among the tests of its setting; others could not be rejected anyway
(Tarone, Biometrics 46, 1990)."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An arm's paired runs beside those of another."""

    arm: Arm
    against: Arm
    own: list[stats.Fall]
    other: list[stats.Fall]

    @cached_property
    def test(self) -> stats.LogRank:
        """Do the arm's runs fall sooner or more often?"""
        return stats.log_rank(self.own, self.other)

    @property
    def is_testable(self) -> bool:
        """Could these pairs have shown anything?"""
        return self.test.least_p <= TESTABLE


def fall_of(run: RunResult) -> stats.Fall | None:
    """The step at which a run collapsed in the reference precision; None without an evaluation after the start."""
    curve, steps = answers(run, "reference"), answered_steps(run, "reference")
    if not steps:
        return None
    start = [record.accuracy for record in run.evals if record.site == "reference" and record.step == 0]
    known = start[0] if start and start[0] is not None else float("nan")
    return stats.fall(steps, [float(value) for value in curve.mean(axis=1)], known, run.status == "diverged")


def compared(arms: Sequence[Arm], control: str) -> list[Compared]:
    """Arms beside their control, as the leaderboard pairs them."""
    falls = {arm.label: _falls(arm) for arm in arms}
    found: list[Compared] = []
    for arm in arms:
        against = control_of(arm, arms, control)
        if against is None or against is arm:
            continue
        keys = [key for key in falls[arm.label] if key in falls[against.label]]
        own, other = ([falls[each.label][key] for key in keys] for each in (arm, against))
        found.append(Compared(arm=arm, against=against, own=own, other=other))
    return found


def _falls(arm: Arm) -> dict[stats.Key, stats.Fall]:
    known = ((key, fall_of(run)) for key, run in by_pair(scored(arm)).items())
    return {key: found for key, found in known if found is not None}


def table(arms: Sequence[Arm], control: str) -> str:
    """Arms of which, or of whose control, a paired run collapsed, the surest first; empty where none did."""
    rows = [row for row in compared(arms, control) if any(run.has_fallen for run in (*row.own, *row.other))]
    adjusted: dict[str, float] = {}
    for context in dict.fromkeys(label(row.arm.context) for row in rows):
        family = [row for row in rows if label(row.arm.context) == context and row.is_testable]
        found = stats.holm([row.test.p for row in family])
        adjusted |= {row.arm.label: p for row, p in zip(family, found, strict=True)}
    rows.sort(key=lambda row: (np.nan_to_num(row.test.p, nan=2.0), row.arm.label))
    shown = [_cells(row, adjusted.get(row.arm.label, math.nan)) for row in rows]
    return markdown_table(HEAD, shown, align="llrllr") if shown else ""


def _cells(row: Compared, adjusted: float) -> tuple[str, ...]:
    return (
        row.arm.label, row.against.label, str(len(row.own)), _words(row.own), _words(row.other),
        f"{row.test.excess:+.1f}", number_cell(row.test.p), number_cell(adjusted),
    )  # fmt: skip


def _words(runs: Sequence[stats.Fall]) -> str:
    """So many of all, and when: "2 of 6, at 40, 60"."""
    steps = sorted(run.step for run in runs if run.has_fallen)
    return f"{len(steps)} of {len(runs)}" + (f", at {', '.join(map(str, steps))}" if steps else "")
