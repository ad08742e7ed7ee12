"""Speed of a step with low-precision rollouts over BF16's, from the capacity plan, with a range from its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from harness.studies.advise.question import Question
from harness.studies.capacity.check import Row, generation_rows, update_rows, verl_rows
from harness.studies.capacity.place import ARMS, GpuSplit, Work, place
from harness.studies.capacity.seconds import Links, StepTime, step
from harness.studies.stage_rates import RATES, Measured, read_measured
from harness.studies.throughput.plan import read_sweep
from harness.studies.throughput.shapes import SIZES

GPU = "h200"
"""The GPU that was measured."""
REST = ("update, time", "verl, score", "verl, update")
"""Measured stages of a step beside generation."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements that speeds rest on."""

    found: Measured
    rows: Sequence[Row]
    """Predictions of the plan beside measurements."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A step's time with BF16 rollouts over its time with a format."""

    kind: Literal["estimated", "assumed", "not known"]
    """estimated: on one GPU, from measured stages; assumed: on several, where links between them are assumed."""
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    words: str = ""
    """Reason why it is not known, or the times that the number rests on."""
    conditions: tuple[str, ...] = ()


def read_evidence(results: Path) -> Evidence:
    """Committed measurements. Raises ValueError naming the one that is missing."""
    sweep = read_sweep(RATES)
    found = read_measured(results, sweep)
    rows = [*generation_rows(results, found, sweep), *update_rows(results, found), *verl_rows(results, found)]
    return Evidence(found=found, rows=rows)


def speed(evidence: Evidence, question: Question, precision: str) -> Speed:
    """Speed-up of a step; "not known" where its stages were not timed, or it does not fit."""
    if question.gpu != GPU:
        return Speed(
            kind="not known", words=f"no rate was measured on {question.gpu}; --gpu {GPU} answers for that one"
        )
    if question.size not in SIZES:
        return Speed(kind="not known", words=f"no rate was measured at {question.size}")
    if precision not in ARMS:
        return Speed(kind="not known", words=f"no rate was measured with {precision}")
    base, own = (_planned(evidence, question, name) for name in ("bf16", precision))
    for name, (at, seconds) in (("bf16", base), (precision, own)):
        if seconds is None:
            reason = at.reason or f"{question.size} was not timed with {name} at this batch and length"
            return Speed(kind="not known", words=f"{name}: {reason}")
    assert base[1] is not None and own[1] is not None
    value = base[1].total / own[1].total
    if base[1].is_host_bound or own[1].is_host_bound:
        waited = f"rates of steps that waited for the host, not for the GPU; of them the plan makes {value:.2f} times"
        return Speed(kind="not known", words=waited)
    low, high = _range(evidence, question, base[1], own[1])
    return Speed(
        kind="estimated" if question.gpus == 1 else "assumed", value=value, low=low, high=high,
        words=_basis(base[1], own[1]), conditions=tuple(_conditions(own[0], own[1])),
    )  # fmt: skip


def placement(question: Question, precision: str) -> GpuSplit | None:
    """Placement of the step on the question's GPUs; None for a size without a shape."""
    if question.size not in SIZES or precision not in ARMS:
        return None
    return place(_work(question, precision), question.gpus)


def _work(question: Question, precision: str) -> Work:
    return Work(size=question.size, arm=precision, length=question.length, batch=question.batch)


def _planned(evidence: Evidence, question: Question, precision: str) -> tuple[GpuSplit, StepTime | None]:
    work = _work(question, precision)
    at = place(work, question.gpus)
    return at, step(evidence.found, work, at, Links())


def _range(evidence: Evidence, question: Question, base: StepTime, own: StepTime) -> tuple[float, float]:
    """Smallest and largest speed-up where generations and the rest of the step err as measured ones did: generations of
    both formats apart, the rest of both by one factor, that of the same size where it was measured."""
    generation = [1.0, *(row.measured / row.predicted for row in evidence.rows if row.what == "generation")]
    rest = [row for row in evidence.rows if row.what in REST]
    rest = [row for row in rest if row.where.startswith(f"{question.size},")] or rest
    factors = [1.0, *(row.measured / row.predicted for row in rest)]
    ends = [(min(x), max(x)) for x in (generation, generation, factors)]

    def total(cost: StepTime, sampled: float, others: float) -> float:
        own_s = cost.seconds["generate"]
        return sampled * own_s + others * (cost.total - own_s)

    ratios = [total(base, a, f) / total(own, b, f) for a, b, f in product(*ends)]
    return min(ratios), max(ratios)


def _basis(base: StepTime, own: StepTime) -> str:
    return (
        f"capacity plan: a step of {base.total:.0f} s with BF16 rollouts, {own.total:.0f} s with these; generation "
        f"{base.seconds['generate']:.0f} and {own.seconds['generate']:.0f} s"
    )


def _conditions(at: GpuSplit, cost: StepTime) -> list[str]:
    found = ["the update computes in BF16 with compiled layers; the low end of the range has it eager, as verl's was"]
    if cost.rounds > 1:
        found.append(f"each engine samples its answers in {cost.rounds} groups, as many as its cache holds")
    if at.ways > 1:
        found.append(f"an engine takes {at.ways} GPUs")
    if at.is_checkpointed:
        found.append("layers are checkpointed")
    return found
