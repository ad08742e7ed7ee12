"""Placement of a step on GPUs: layouts, responses that sample at a time, micro-batches, checkpoints, what fits.

    Layout      GPUs of an engine, GPUs that share a sequence, offloading, adapters or all weights
    placements  a layout's micro-batches: all activations kept or checkpoints, whole or halved
    place       the first placement that fits, as an out-of-memory retry of a run goes: activations kept, then
                checkpoints, then halved micro-batches; one engine per GPU, then tensor parallel over 2, 4 or 8

The fastest of all is `harness.studies.capacity.fastest`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from harness.foundation.did_you_mean import nearest
from harness.studies.capacity.host import HOST_GIB, NODE, host_parts, usable_gib
from harness.studies.capacity.memory import USABLE_GIB, Parts, at_once, sampling_parts, update_parts
from harness.studies.stage_rates import ARMS as LOW
from harness.studies.throughput.shapes import PRECISIONS, shape_of
from harness.trainers.verl.checks import check_shared_engine

ARMS = {"bf16": ("bf16", "bf16")} | LOW
"""Name -> (precision of the rollouts, arithmetic of the trainer)."""
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
    host_gib: float = HOST_GIB
    """Main memory of a machine for each of its GPUs, GiB."""

    def __post_init__(self) -> None:
        longest = shape_of(self.size).max_positions
        if self.arm not in ARMS:
            raise ValueError(f"arm: {self.arm!r} is unknown; {nearest(self.arm, ARMS)}")
        for name in ("batch", "prompt", "pass_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a whole number above 0 is expected")
        if not 0 < self.host_gib < math.inf:
            raise ValueError(f"host_gib={self.host_gib}: a number of GiB above 0 is expected")
        if not 1 <= self.length <= longest - self.prompt:
            raise ValueError(f"lengths={self.length}: {self.size} answers with 1 to {longest - self.prompt} tokens")

    @property
    def row(self) -> int:
        """Tokens of a response with its prompt."""
        return self.prompt + self.length

    @property
    def precision(self) -> str:
        """Precision of the rollouts."""
        return ARMS[self.arm][0]

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the trainer."""
        return ARMS[self.arm][1]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axes along which a step is spread; what is left of the GPUs is data parallel."""

    ways: int = 1
    """GPUs of an engine, tensor parallel."""
    split: int = 1
    """GPUs that share every sequence of the trainer (Ulysses)."""
    is_offloaded: bool = False
    """Masters and moments wait on the host while the engine samples."""
    is_lora: bool = False
    """Adapters are trained, and nothing else."""

    @property
    def words(self) -> str:
        """The axes in words."""
        found = [f"engines over {self.ways} GPUs"] * (self.ways > 1)
        found += [f"sequences over {self.split} GPUs"] * (self.split > 1)
        found += ["offloaded"] * self.is_offloaded + ["LoRA"] * self.is_lora
        return ", ".join(found) or "data parallel"

    @property
    def marks(self) -> list[str]:
        """The axes as marks of a table's cell."""
        found = [f"tp{self.ways}"] * (self.ways > 1) + [f"sp{self.split}"] * (self.split > 1)
        return found + ["off"] * self.is_offloaded + ["lora"] * self.is_lora


HOST = "the host"
"""Name of the host in `GpuSplit.lacks`."""


@dataclass(frozen=True, kw_only=True)
class GpuSplit:
    """Placement of a step on GPUs."""

    gpus: int
    layout: Layout
    share: int
    """Responses of an engine."""
    at_once: int
    """Responses that sample at a time, as many as the cache holds; 0 where it does not fit."""
    rows: int
    """Responses of a micro-batch on one GPU, or on those that share its sequences."""
    tokens: int
    """Tokens of a micro-batch on one GPU."""
    is_checkpointed: bool
    sampling: Parts
    update: Parts
    host: Parts
    """Main memory of the machine of rank 0."""
    host_room_gib: float
    """Share of it that a plan may fill."""
    refusal: str
    """Words with which the trainer refuses the engine; empty where it takes it."""

    @property
    def ways(self) -> int:
        """GPUs of an engine."""
        return self.layout.ways

    @property
    def sampling_gib(self) -> float:
        """Memory of a GPU that samples, the cache left out."""
        return sum(self.sampling.values())

    @property
    def update_gib(self) -> float:
        """At the peak of the backward pass."""
        return sum(self.update.values())

    @property
    def host_gib(self) -> float:
        """Main memory of the machine of rank 0."""
        return sum(self.host.values())

    @property
    def lacks(self) -> dict[str, str]:
        """Parts that do not fit -> why, in words: an engine that GPUs cannot share, the update and sampling on a GPU,
        with room for a response in the cache, and the host."""
        refused = {"the engine": self.refusal} if self.refusal else {}
        return refused | {
            what: f"{what} needs {needed:.1f} of {room:.1f} GiB a {of}, {most} {parts[most]:.1f}"
            for what, parts, needed, room, of, fits in (
                ("the update", self.update, self.update_gib, USABLE_GIB, "GPU", self.update_gib <= USABLE_GIB),
                ("sampling", self.sampling, self.sampling_gib, USABLE_GIB, "GPU", self.at_once >= 1),
                (HOST, self.host, self.host_gib, self.host_room_gib, "machine", self.host_gib <= self.host_room_gib),
            )
            if not fits
            for most in [max(parts, key=lambda name: parts[name])]
        }

    @property
    def fits_gpu(self) -> bool:
        """Is there so much memory on a GPU, of an engine that can be?"""
        return not self.lacks.keys() - {HOST}

    @property
    def reason(self) -> str:
        """Reason why it does not fit; empty where it does."""
        return "; ".join(self.lacks.values())

    @property
    def verdict(self) -> str:
        """Answer in words: does it fit?"""
        if self.reason:
            return "does not fit"
        return "fits" if self.at_once >= self.share else f"fits, {self.at_once} of {self.share} at a time"


def check_gpus(gpus: int) -> None:
    """Raises ValueError for a number of GPUs that is no part of a node and no whole nodes."""
    if gpus < 1 or (gpus > NODE and gpus % NODE):
        raise ValueError(f"--gpus {gpus}: 1 to {NODE}, or whole nodes of {NODE}, are expected")


def place(work: Work, gpus: int) -> GpuSplit:
    """The first choice that fits, the thriftiest where none does."""
    check_gpus(gpus)
    found: GpuSplit | None = None
    for ways in engine_ways(work.size, gpus):
        found = first_that_fits(work, gpus, Layout(ways=ways))
        if found.at_once and HOST not in found.lacks:
            break
    assert found is not None
    return found


def layouts(work: Work, gpus: int) -> list[Layout]:
    """Every layout, the plainest first."""
    return [
        Layout(ways=ways, split=split, is_offloaded=is_offloaded, is_lora=is_lora)
        for is_lora in (False, True)
        for is_offloaded in (False, True)
        for split in sequence_splits(work.size, gpus)
        for ways in engine_ways(work.size, gpus)
    ]


def engine_ways(size: str, gpus: int) -> list[int]:
    """Numbers of GPUs that an engine may have."""
    return [n for n in (1, 2, 4, 8) if gpus % n == 0 and shape_of(size).num_heads % n == 0]


@cache
def refusal(size: str, precision: str, ways: int) -> str:
    """Words with which the trainer refuses an engine over so many GPUs; empty where it takes it."""
    try:
        check_shared_engine(ways, PRECISIONS[precision], shape_of(size))
    except ValueError as error:
        return str(error)
    return ""


def sequence_splits(size: str, gpus: int) -> list[int]:
    """Numbers of GPUs that may share a sequence: heads and key-value heads divide by them."""
    shape = shape_of(size)
    return [n for n in engine_ways(size, gpus) if shape.num_kv_heads % n == 0]


def first_that_fits(work: Work, gpus: int, layout: Layout) -> GpuSplit:
    """The first placement of a layout whose update fits, the thriftiest where none does."""
    found: GpuSplit | None = None
    for found in placements(work, gpus, layout):
        if found.update_gib <= USABLE_GIB:
            break
    assert found is not None
    return found


def placements(work: Work, gpus: int, layout: Layout) -> Iterator[GpuSplit]:
    """A layout with every micro-batch: all activations kept, then checkpoints, then halved."""
    offloads, is_lora = layout.is_offloaded, layout.is_lora
    sampling = sampling_parts(
        work.size, work.precision, gpus, layout.ways, is_offloaded=offloads, is_lora=is_lora,
        arithmetic=work.arithmetic,
    )  # fmt: skip
    host = host_parts(work.size, work.precision, gpus, layout.ways, is_offloaded=offloads, is_lora=is_lora)
    fits = at_once(work.size, work.precision, work.row, USABLE_GIB - sum(sampling.values()), layout.ways)
    for rows, is_checkpointed in _micro_batches(work, gpus, layout.split):
        tokens = math.ceil(rows * work.row / layout.split)
        update = update_parts(
            work.size, work.arithmetic, gpus, tokens, is_checkpointed, is_lora=is_lora,
            is_sharded=gpus > 1 or offloads,
        )  # fmt: skip
        yield GpuSplit(
            gpus=gpus, layout=layout, share=math.ceil(work.batch * layout.ways / gpus), at_once=fits, rows=rows,
            tokens=tokens, is_checkpointed=is_checkpointed, sampling=sampling, update=update, host=host,
            host_room_gib=usable_gib(work.host_gib, gpus), refusal=refusal(work.size, work.precision, layout.ways),
        )  # fmt: skip


def _micro_batches(work: Work, gpus: int, split: int) -> Iterator[tuple[int, bool]]:
    rows = max(1, min(work.pass_tokens * split // work.row, math.ceil(work.batch * split / gpus)))
    yield rows, False
    while True:
        yield rows, True
        if rows == 1:
            return
        rows //= 2


def remedy(work: Work, gpus: int, *, is_lora: bool = False) -> int | None:
    """The fewest GPUs, a doubling of 1, beyond `gpus` on which some layout fits that trains all weights, or adapters
    alone (`is_lora`); None where none do."""
    tried = 1
    while tried <= MOST_GPUS:
        if tried > gpus and any(
            not first_that_fits(work, tried, layout).reason
            for layout in layouts(work, tried)
            if layout.is_lora == is_lora
        ):
            return tried
        tried *= 2
    return None


def works(sizes: list[str], lengths: list[int], base: Work) -> list[Work]:
    """Every size, length and arm of a table, with all else as in `base`. Raises ValueError as `Work` does."""
    return [replace(base, size=s, length=n, arm=arm) for s in sizes for n in lengths for arm in ARMS]
