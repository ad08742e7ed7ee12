"""Placement of a step on GPUs: replicas, responses that sample at a time, micro-batches, checkpoints, what fits.

Choices in this order, the first that fits: all layers' activations kept, then checkpoints, then halved micro-batches
(as an out-of-memory retry of a run does); one engine per GPU, then tensor parallel over 2, 4 or 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.foundation.did_you_mean import nearest
from harness.studies.capacity.memory import USABLE_GIB, Parts, at_once, sampling_parts, update_parts
from harness.studies.stage_rates import ARMS as LOW
from harness.studies.throughput.shapes import shape_of

ARMS = {"bf16": ("bf16", "bf16")} | {name: LOW[name] for name in ("fp8_block", "fp8_block+kv8", "int8", "one FP8 flow")}
"""Name -> (precision of the rollouts, arithmetic of the trainer): the arms of the plan's tables."""
EVERY = ARMS | LOW
"""Every arm that has rates."""
NODE = 8
"""GPUs of a node."""
MOST_GPUS = 1024
"""Up to which a remedy is looked for."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a step: model size, arm, lengths and batch."""

    size: str
    arm: str
    length: int
    """Tokens of every response."""
    batch: int = 512
    """Responses of a step."""
    prompt: int = 64
    pass_tokens: int = 16896
    """Tokens of a micro-batch on one GPU (`launch.micro_batch_tokens`), one response at least: 16384 and prompts."""

    def __post_init__(self) -> None:
        longest = shape_of(self.size).max_positions
        if self.arm not in EVERY:
            raise ValueError(f"arm: {self.arm!r} is unknown; {nearest(self.arm, EVERY)}")
        for name in ("batch", "prompt", "pass_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a whole number above 0 is expected")
        if not 1 <= self.length <= longest - self.prompt:
            raise ValueError(f"lengths={self.length}: {self.size} answers with 1 to {longest - self.prompt} tokens")

    @property
    def row(self) -> int:
        """Tokens of a response with its prompt."""
        return self.prompt + self.length

    @property
    def precision(self) -> str:
        """Precision of the rollouts."""
        return EVERY[self.arm][0]

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the trainer."""
        return EVERY[self.arm][1]


@dataclass(frozen=True, kw_only=True)
class GpuSplit:
    """Placement of a step on GPUs."""

    gpus: int
    ways: int
    """GPUs of an engine."""
    share: int
    """Responses of an engine."""
    at_once: int
    """Responses that sample at a time, as many as the cache holds; 0 where it does not fit."""
    rows: int
    """Responses of a micro-batch on one GPU."""
    is_checkpointed: bool
    sampling: Parts
    update: Parts

    @property
    def sampling_gib(self) -> float:
        """Without the cache."""
        return sum(self.sampling.values())

    @property
    def update_gib(self) -> float:
        """At the peak of the backward pass."""
        return sum(self.update.values())

    @property
    def reason(self) -> str:
        """Reason why it does not fit; empty where it does."""
        found = [
            f"{what} needs {needed:.1f} of {USABLE_GIB:.1f} GiB a GPU, {most} {parts[most]:.1f}"
            for what, parts, needed, is_over in (
                ("the update", self.update, self.update_gib, self.update_gib > USABLE_GIB),
                ("sampling", self.sampling, self.sampling_gib, self.at_once < 1),
            )
            if is_over
            for most in [max(parts, key=lambda name: parts[name])]
        ]
        return "; ".join(found)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.reason:
            return "does not fit"
        return "fits" if self.at_once >= self.share else f"fits, {self.at_once} of {self.share} at a time"


def check_gpus(gpus: int) -> int:
    """A number of GPUs. Raises ValueError for one that is no part of a node and no whole nodes."""
    if gpus < 1 or (gpus > NODE and gpus % NODE):
        raise ValueError(f"--gpus {gpus}: 1 to {NODE}, or whole nodes of {NODE}, are expected")
    return gpus


def place(work: Work, gpus: int) -> GpuSplit:
    """The first choice that fits, the thriftiest where none does."""
    check_gpus(gpus)
    ways, fits, sampling = _engine(work, gpus)
    rows, is_checkpointed, update = _trainer(work, gpus)
    return GpuSplit(
        gpus=gpus, ways=ways, share=math.ceil(work.batch * ways / gpus), at_once=fits, rows=rows,
        is_checkpointed=is_checkpointed, sampling=sampling, update=update,
    )  # fmt: skip


def _engine(work: Work, gpus: int) -> tuple[int, int, Parts]:
    heads = shape_of(work.size).num_heads
    ways, fits, parts = 1, 0, Parts()
    for ways in [n for n in (1, 2, 4, 8) if gpus % n == 0 and heads % n == 0]:
        parts = sampling_parts(work.size, work.precision, gpus, ways)
        fits = at_once(work.size, work.precision, work.row, USABLE_GIB - sum(parts.values()), ways)
        if fits:
            break
    return ways, fits, parts


def _trainer(work: Work, gpus: int) -> tuple[int, bool, Parts]:
    found: tuple[int, bool, Parts] | None = None
    for rows, is_checkpointed in _micro_batches(work, gpus):
        parts = update_parts(work.size, work.arithmetic, gpus, rows * work.row, is_checkpointed)
        found = rows, is_checkpointed, parts
        if sum(parts.values()) <= USABLE_GIB:
            break
    assert found is not None
    return found


def _micro_batches(work: Work, gpus: int) -> Iterator[tuple[int, bool]]:
    rows = max(1, min(work.pass_tokens // work.row, math.ceil(work.batch / gpus)))
    yield rows, False
    while True:
        yield rows, True
        if rows == 1:
            return
        rows //= 2


def remedy(work: Work, gpus: int) -> int | None:
    """The fewest GPUs, a doubling of 1, beyond `gpus` on which the work fits; None where none do."""
    tried = 1
    while tried <= MOST_GPUS:
        if tried > gpus and not place(work, tried).reason:
            return tried
        tried *= 2
    return None


def works(sizes: list[str], lengths: list[int], base: Work) -> list[Work]:
    """Every size, length and arm of a table, with all else as in `base`. Raises ValueError as `Work` does."""
    return [replace(base, size=s, length=n, arm=arm) for s in sizes for n in lengths for arm in ARMS]
