"""Change of accuracy at a dose of mismatch: known within the studied sizes and lengths, beyond by the dose alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.engines.vllm.memory import num_parameters
from harness.studies.advise.question import Question
from harness.studies.dose.candidates import held_out_errors
from harness.studies.dose.curve import Bin, bins, dose_of, fitted, predicted
from harness.studies.dose.points import DOSE, NONE, Point, read_points
from harness.studies.dose.study import NAMED, TASK

CORRECTIONS = (NONE, "TIS")
"""Corrections whose curve rests on enough sizes and lengths."""
LENGTH = "length alone"
NO_INTERVAL = "too few bases have run at such a dose for an interval"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Runs of one correction, read for one deployment."""

    correction: str
    points: list[Point]
    """With what counts as `loss`."""
    bins: list[Bin]
    error: float
    """Root mean square error on held-out sizes, lengths and engines."""
    cliff: float
    """Dose at which NAMED of accuracy is lost; infinite where none is."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Evidence for one deployment."""

    by_correction: dict[str, Curve]
    most_parameters: float
    shortest: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Expected change of accuracy against BF16 rollouts; below 0: worse."""

    kind: Literal["known", "dose only", "not known"]
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """Simultaneous 95 % interval, of "known" alone."""
    error: float = math.nan
    """The dose study's error on held-out settings, of "dose only" alone."""
    num_runs: int = 0
    dose: float = math.nan
    collapsed: str = ""
    """Runs at such doses that collapsed, where any did: they are in no mean."""
    words: str = ""
    """Source of the number, or the reason why there is none."""
    changes: tuple[str, ...] = ()
    """Reasons that would change the answer."""

    @property
    def shown(self) -> str:
        """The answer as the text of a cell."""
        if self.kind == "not known":
            return f"not known: {self.words}"
        fell = f", {self.collapsed}" if self.collapsed else ""
        if self.kind == "known":
            return f"{self.change:+.3f} [{self.low:+.3f}, {self.high:+.3f}], {self.num_runs} runs{fell}"
        return f"not known; if only the dose matters: {self.change:+.3f}, error {self.error:.3f}{fell}"


def read_curves(results: Path, deploy: str) -> Curves:
    """Evidence from all packed records. Raises ValueError where there is too little."""
    return curves_of(read_points(results), deploy)


def curves_of(points: Sequence[Point], deploy: str) -> Curves:
    """Curves of the task with enough runs; `deploy` chooses whose accuracy counts: the BF16 policy's or the
    sampler's."""
    own = [p for p in points if p.task == TASK and p.correction in CORRECTIONS]
    if deploy == "rollout":
        own = [replace(p, loss=p.deployed_loss) for p in own if math.isfinite(p.deployed_loss)]
    if not own:
        raise ValueError(f"advise: no packed run of {TASK} has a dose")
    grouped = bins(own)
    lengths = [p.doses[LENGTH] for p in own]
    return Curves(
        by_correction={
            name: _curve(name, [p for p in own if p.correction == name], [b for b in grouped if b.correction == name])
            for name in dict.fromkeys(p.correction for p in own)
        },
        most_parameters=max(_parameters(name) for name in {p.base.split()[0] for p in own}),
        shortest=min(lengths), longest=max(lengths),
    )  # fmt: skip


def accuracy(curves: Curves, question: Question, precision: str, correction: str) -> Accuracy:
    """The change of accuracy of one format with one correction."""
    mismatch, curve = question.mismatch.get(precision), curves.by_correction.get(correction)
    if mismatch is None:
        return Accuracy(kind="not known", words=f"no mismatch is given for {precision}; lowbit probe measures it")
    dose = mismatch.k3 * question.length
    if curve is None or dose > max(p.dose for p in curve.points):
        return Accuracy(kind="not known", dose=dose, words=f"no run had a dose of {dose:.2g} {_named(correction)}")
    changes = tuple(_changes(question, curve, mismatch.k3, dose))
    source = f"dose {dose:.2g} = k3 {mismatch.k3:.2g} ({mismatch.source}) x {question.length} tokens"
    near = next((b for b in curve.bins if b.low <= dose < b.high), None)
    fell = "" if near is None or not near.collapsed.count else _fell(near)
    is_inside = question.num_parameters <= curves.most_parameters
    is_inside = is_inside and curves.shortest <= question.length <= curves.longest
    if is_inside and near is not None and math.isfinite(near.loss_low):
        return Accuracy(
            kind="known", change=-near.loss, low=-near.loss_high, high=-near.loss_low, num_runs=near.num_runs,
            dose=dose, collapsed=fell, changes=changes,
            words=f"{source}; {near.num_runs} runs of sorting digits on {near.num_bases} bases at doses of "
            f"{near.name}, {_named(correction)}",
        )  # fmt: skip
    if is_inside:
        return Accuracy(kind="not known", dose=dose, words=NO_INTERVAL, changes=changes)
    change = -float(predicted(_fit(curve.points), np.array([dose]))[0])
    return Accuracy(
        kind="dose only", change=change, error=curve.error, num_runs=len(curve.points), dose=dose,
        collapsed=fell, changes=changes,
        words=f"{source}; curve of {len(curve.points)} runs of sorting digits, at most "
        f"{curves.most_parameters / 1e6:.0f}M parameters and {curves.longest:.0f} tokens, {_named(correction)}; "
        "the error is that on sizes, lengths and engines left out of the fit",
    )  # fmt: skip


def _curve(correction: str, points: list[Point], own: list[Bin]) -> Curve:
    alive = [p for p in points if not p.has_collapsed]
    errors = held_out_errors(alive, DOSE)
    known = errors[np.isfinite(errors)]
    return Curve(
        correction=correction, points=alive, bins=own, cliff=dose_of(_fit(alive), NAMED),
        error=math.sqrt(float((known**2).mean())) if len(known) else math.nan,
    )  # fmt: skip


def _fit(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    return fitted(np.array([p.dose for p in points]), np.array([p.loss for p in points]))


def _changes(question: Question, curve: Curve, k3: float, dose: float) -> list[str]:
    """The k3 and the length at which the curve loses NAMED."""
    if not math.isfinite(curve.cliff) or k3 == 0:
        return []
    where = f"{NAMED:g} of accuracy at a dose of {curve.cliff:.2g} {_named(curve.correction)}"
    side = "reached from" if dose < curve.cliff else "avoided below"
    return [
        f"the curve loses {where}: {side} {curve.cliff / k3:,.0f} tokens at this k3, or a k3 of "
        f"{curve.cliff / question.length:.2g} at this length"
    ]


def _fell(near: Bin) -> str:
    return f"{near.collapsed.count} of {near.collapsed.total} runs at such doses collapsed"


def _named(correction: str) -> str:
    return "without a correction" if correction == NONE else f"with {correction}"


def _parameters(name: str) -> float:
    return float(num_parameters(decoder_config(load([f"model={name}", "method=naive", "precision=int8"]).model)))
