"""The fastest layout of a step on so many GPUs, and why not the others.

Every layout is tried with every micro-batch that fits, and the least sum of a step's seconds wins; of equals the
plainer. Adapters are another method, so LoRA is taken where no layout that trains all weights fits, or where it is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.studies.capacity.place import GpuSplit, Layout, Work, check_gpus, first_that_fits, layouts, placements
from harness.studies.capacity.seconds import Generation, Links, StepTime, generation, step_after
from harness.studies.stage_rates import Measured

TRAINS = ("any", "full", "lora")
"""Weights that a plan may train: all of them, and adapters where those do not fit; all; adapters."""
NOT_TIMED = "fits; its engine was not timed"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A layout with its fastest micro-batches."""

    at: GpuSplit
    step: StepTime | None
    """None where it does not fit or was not timed."""

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite where it has none."""
        return math.inf if self.step is None else self.step.total


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest layout beside all others. Where nothing fits or was timed, the first that fits or the thriftiest."""

    taken: Tried
    others: tuple[Tried, ...]

    def why(self) -> Iterator[str]:
        """A line for the layout that is taken, and one for each other: its seconds, or the memory that it lacks."""
        at, cost = self.taken.at, self.taken.step
        if cost is None:
            yield f"{at.layout.words}: {at.reason or NOT_TIMED}"
        else:
            yield f"taken: {at.layout.words}, {cost.total:.1f} s"
        for other in sorted(self.others, key=lambda other: (other.at.layout.is_lora, other.seconds)):
            yield f"{other.at.layout.words}: {self._reason(other)}"

    def _reason(self, other: Tried) -> str:
        if other.step is None or self.taken.step is None:
            return other.at.reason or NOT_TIMED
        total = f"{other.step.total:.1f} s"
        if other.at.layout.is_lora and not self.taken.at.layout.is_lora:
            return f"{total}, trains adapters alone"
        more = {stage: seconds - self.taken.step.seconds[stage] for stage, seconds in other.step.seconds.items()}
        stage = max(more, key=lambda name: more[name])
        return f"{total}, {stage} {more[stage]:+.1f} s"


def fastest(found: Measured, work: Work, gpus: int, links: Links, *, trains: str = "any") -> Choice:
    """Choose. `trains`: one of TRAINS. Raises ValueError for a number of GPUs that is no part of a node and no whole
    nodes."""
    check_gpus(gpus)
    known: dict[tuple[int, int], Generation | None] = {}
    tried = [best(found, work, gpus, links, layout, known) for layout in allowed(work, gpus, trains)]
    full = [each for each in tried if not each.at.layout.is_lora]
    for some in (full, tried):
        taken = min(some, key=lambda each: each.seconds, default=None)
        if taken is not None and taken.step is not None:
            return _beside(taken, tried)
    fitting = [each for each in tried if not each.at.reason]
    return _beside(fitting[0] if fitting else _thriftiest(tried), tried)


def _thriftiest(tried: list[Tried]) -> Tried:
    """The one that lacks least: memory of a GPU first, then of the host."""
    if fitting := [each for each in tried if each.at.fits_gpu]:
        return min(fitting, key=lambda each: each.at.host_gib)
    return min(tried, key=lambda each: (bool(each.at.refusal), max(each.at.update_gib, each.at.sampling_gib)))


def allowed(work: Work, gpus: int, trains: str) -> list[Layout]:
    """Layouts that a plan takes into account."""
    return [each for each in layouts(work, gpus) if trains == "any" or each.is_lora == (trains == "lora")]


def _beside(taken: Tried, tried: list[Tried]) -> Choice:
    return Choice(taken=taken, others=tuple(each for each in tried if each is not taken))


def best(
    found: Measured, work: Work, gpus: int, links: Links, layout: Layout,
    known: dict[tuple[int, int], Generation | None],
) -> Tried:  # fmt: skip
    """A layout with its fastest micro-batches; where nothing fits or was timed, its first that fits. `known`: sampling
    by GPUs of an engine and responses at a time, which layouts share."""
    first = first_that_fits(work, gpus, layout)
    key = first.ways, first.at_once
    if key not in known:
        known[key] = generation(found, work, first, links)
    sampled = known[key]
    if first.reason or sampled is None:
        return Tried(at=first, step=None)
    fitting = [at for at in placements(work, gpus, layout) if not at.reason]
    timed = [Tried(at=at, step=step_after(found, work, at, links, sampled)) for at in fitting]
    return min(timed, key=lambda each: each.seconds)
