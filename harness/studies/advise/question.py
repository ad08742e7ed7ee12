"""The question: a model's size, the length of answers, the GPUs, what is deployed, and the mismatch of formats."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.foundation.did_you_mean import nearest
from harness.studies.capacity.host import NODE
from harness.studies.capacity.place import Work, check_gpus
from harness.studies.probe.record import FLOOR, Record, read
from harness.studies.stage_rates import ARMS
from harness.studies.throughput.shapes import SIZES
from harness.sweep.folder_time import GPUS

FORMATS = tuple(name for name in ARMS if name != "one FP8 flow")
"""Formats with measured rates."""
UNITS = {"m": 1e6, "b": 1e9}
DEPLOY = {"bf16": "BF16 weights", "rollout": "weights of the rollout format"}
"""Weights that can be deployed, in words."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Distance between a format's sampler and the trainer."""

    k3: float
    """Nats a token."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question."""

    size: str
    """A size of Qwen2.5 ("7b"), or any number of parameters ("3m")."""
    length: int
    """Tokens of an answer."""
    batch: int = 512
    """Answers of a step."""
    gpu: str = "h200"
    gpus: int = 1
    deploy: Literal["bf16", "rollout"] = "bf16"
    """Deployed weights: BF16, or those of the rollout format."""
    mismatch: Mapping[str, Mismatch]
    """Format -> mismatch, where it is known."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?[mb]", self.size) is None or self.num_parameters == 0:
            raise ValueError(f"--size {self.size}: a number of parameters such as 7b or 3m is expected")
        if self.deploy not in DEPLOY:
            raise ValueError(f"--deploy {self.deploy}: valid: {', '.join(DEPLOY)}")
        for name in ("length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: a whole number above 0 is expected")
        if self.gpu not in GPUS:
            raise ValueError(f"--gpu {self.gpu}: an unknown GPU; {nearest(self.gpu, GPUS)}")
        check_gpus(self.gpus)
        if self.size in SIZES:
            Work(size=self.size, arm="bf16", length=self.length, batch=self.batch)

    @property
    def num_parameters(self) -> float:
        """Parameters, by the name of the size."""
        return float(self.size[:-1]) * UNITS[self.size[-1]]

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats to advise on: those with rates, and others of the probe."""
        return tuple(dict.fromkeys([*FORMATS, *(name for name in self.mismatch if name != FLOOR)]))

    @property
    def nodes(self) -> int:
        """Number of machines that the GPUs are in."""
        return math.ceil(self.gpus / NODE)


def given_mismatch(text: str) -> dict[str, Mismatch]:
    """K3 as words: one number for every format, or `fp8_block=2e-3,int8=1e-4`. Raises ValueError for anything else."""
    found, names = dict[str, Mismatch](), list[str]()
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        try:
            k3 = float(value)
        except ValueError:
            k3 = math.nan
        if not 0 <= k3 < math.inf:
            raise ValueError(
                f"--k3 {part}: nats a token, 0 or more, are expected, such as 2e-3 or fp8_block=2e-3,int8=1e-4"
            )
        if name and name not in FORMATS:
            raise ValueError(f"--k3 {part}: {name} is no format with measured rates; {nearest(name, FORMATS)}")
        if name in names:
            raise ValueError(f"--k3 {text}: {name or 'the k3 of every format'} is given twice")
        names.append(name)
        source = f"--k3 {part}" if name else f"--k3 {part}, taken for every format"
        found |= {one: Mismatch(k3=k3, source=source) for one in ([name] if name else FORMATS)}
    return found


def read_probe(path: Path) -> Record:
    """A probe's record. Raises ValueError for a file that is none, and for one of untrained weights: their mismatch
    says nothing of a trained model."""
    record = read(path)
    if record["is_untrained"]:
        raise ValueError(f"--probe {path}: of untrained weights; costs alone count, its mismatch is not read")
    return record


def probed_mismatch(record: Record) -> dict[str, Mismatch]:
    """K3 of every format of a probe."""
    return {row["precision"]: _mismatch(record, row) for row in record["formats"]}


def size_warning(record: Record, question: Question) -> str:
    """Words on a probe of a model that has not half to twice the parameters of the question's size; else empty."""
    count = int(record["formats"][0]["num_parameters"])
    if question.num_parameters / 2 <= count <= 2 * question.num_parameters:
        return ""
    return f"of a model of {count / 1e6:,.2f} million parameters, --size is {question.size}: its k3 need not hold there"


def _mismatch(record: Record, row: Record) -> Mismatch:
    length, folder = row["length_mean"], record["folder"]
    return Mismatch(
        k3=row["mismatch"]["kl_k3"],
        source=f"probe {record['id']} of {folder}, {row['num_answers']} answers of {length:.0f} tokens in the mean",
    )
