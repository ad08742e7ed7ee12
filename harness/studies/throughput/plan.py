"""Plan of a throughput sweep: its YAML file, its cells, the engines to load, and what is still missing.

Every engine is one process that loads one model: a size in a precision, or the long generation that checks the map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from harness.config.load import parse, read_yaml
from harness.config.schema import Name
from harness.foundation.did_you_mean import nearest
from harness.foundation.project_files import SWEEPS
from harness.studies.throughput.map_cells import MapCell, cell_key
from harness.studies.throughput.settled import doubtful
from harness.studies.throughput.shapes import PRECISIONS, SIZES, plan_of, shape_of
from harness.sweep import file_of

BASELINE = "bf16"
Context = Literal["filled", "prefilled"]
ONLY = {"size": SIZES, "precision": PRECISIONS}
"""Keys of `--only` -> their valid values."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One whole generation, to compare with what the map predicts for it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    size: str
    precision: str
    batch: int
    length: int
    """New tokens."""
    seconds: float
    """Seconds that it may take, engine load included; it is not started with less time left."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One cell measured at contexts of both kinds in one engine: filled with dummy values, and prefilled."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    size: str
    precision: str
    batch: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One engine outside the product of sizes and precisions."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    size: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One `sweeps/throughput_*.yaml`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Name
    device: Literal["cuda", "cpu"]
    sizes: tuple[str, ...]
    """In the order they are measured."""
    precisions: tuple[str, ...]
    """In the order they are measured within a size."""
    extra: tuple[Extra, ...] = ()
    """Measured behind the product."""
    lengths: tuple[int, ...]
    """Contexts in tokens, prompt included."""
    batches: tuple[int, ...]
    prompt: int = 64
    """Tokens of a prompt, where the cost of a whole generation is computed."""
    context: Context = "filled"
    min_steps: int = 24
    max_steps: int = 96
    warm_steps: int = 6
    """Steps of a cell that are run and not counted."""
    cell_s: float = 0.8
    """Seconds of counted steps after which a cell stops, once it has `min_steps`."""
    prefill_tokens: int = 8192
    """Tokens of the batch whose prefill is timed, in prompts of an eighth each; 0 for none."""
    breakdown: tuple[int, ...] = ()
    """Batches whose step is taken apart, at the shortest length."""
    pairs: tuple[Pair, ...] = ()
    checks: tuple[Check, ...] = ()
    engine: Mapping[str, Any] | None = None
    """Further arguments of `vllm.LLM`; they win over the harness's."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the engine processes."""
    engine_s: float = 150.0
    """Seconds after which an engine is killed."""
    start_s: float = 25.0
    """An engine is not started with less time left."""
    memory_gib: float | None = None
    """Memory of the device, where torch cannot say it."""

    def __post_init__(self) -> None:
        for name in ("sizes", "precisions", "lengths", "batches"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}={list(values)}: at least one value, and none twice, is expected")
        for name in ("lengths", "batches"):
            values = list(getattr(self, name))
            if values != sorted(values) or values[0] < 1:
                raise ValueError(f"{name}={values}: rising whole numbers above 0 are expected")
        named = (*self.extra, *self.pairs, *self.checks)
        for size in (*self.sizes, *(entry.size for entry in named)):
            shape_of(size)
        for precision in (*self.precisions, *(entry.precision for entry in named)):
            plan_of(precision)
        for entry in self.extra:
            if entry.size not in self.sizes or entry.precision in self.precisions:
                raise ValueError(
                    f"extra: {entry.size}-{entry.precision} needs a size of sizes, and no precision of theirs"
                )
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(f"min_steps={self.min_steps}: between 1 and max_steps={self.max_steps} is expected")
        if self.lengths[0] <= self.most_new_tokens:
            raise ValueError(
                f"lengths={list(self.lengths)}: above the {self.most_new_tokens} tokens that a cell decodes is expected"
            )
        unknown = set(self.breakdown) - set(self.batches)
        if unknown:
            raise ValueError(f"breakdown={list(self.breakdown)}: {sorted(unknown)} is not among batches")
        for check in self.checks:
            if check.batch not in self.batches or check.length > self.lengths[-1]:
                raise ValueError(f"checks: batch={check.batch} length={check.length} is outside batches or lengths")

    @property
    def most_new_tokens(self) -> int:
        """Tokens that a sequence of a cell decodes at most, and those that are in flight when it stops."""
        return self.warm_steps + self.max_steps + 4

    @property
    def max_model_len(self) -> int:
        """Tokens that the longest sequence of the sweep reaches."""
        longest = max([self.lengths[-1], *(self.prompt + check.length for check in self.checks)])
        return longest + 128


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine to load and measure: a size in a precision."""

    size: str
    precision: str
    check: Check | None = None
    """The long generation to measure in place of the map's cells."""

    @property
    def stem(self) -> str:
        """Name of its result file, without ending."""
        return f"{self.size}-{self.precision}" + ("-check" if self.check is not None else "")


def read_sweep(name: str, folder: Path = SWEEPS) -> Sweep:
    """The sweep `name`, or a path to a YAML file. Raises ValueError, one line, for unknown names, keys or values."""
    is_elsewhere = name.endswith((".yaml", ".yml")) and Path(name).is_file() and Path(name).parent != folder
    path = Path(name) if is_elsewhere else file_of(name, folder, "throughput")  # one elsewhere has any name
    try:
        values = {"name": path.stem} | read_yaml(path)
        fields = [field.name for field in dataclasses.fields(Sweep)]
        for key in values:
            if key not in fields:
                raise ValueError(f"unknown key {key}; {nearest(key, fields)}")
        return parse(Sweep, values)
    except ValueError as error:
        words = str(error)
        raise ValueError(words if str(path) in words else f"{path}: {words}") from None


def cells(sweep: Sweep) -> list[MapCell]:
    """Every (batch, length), large batches first: at each length the engine meets its heaviest shape early."""
    return [(batch, length) for length in sweep.lengths for batch in sorted(sweep.batches, reverse=True)]


def engine_specs(sweep: Sweep, only: Mapping[str, Collection[str]] | None = None) -> list[EngineSpec]:
    """Every engine in the order of the file, checks first: they take longest.

    `only` keeps those with one of its sizes and one of its precisions (`read_only`). Raises ValueError where it keeps
    none.
    """
    everything = [EngineSpec(size=check.size, precision=check.precision, check=check) for check in sweep.checks]
    everything += [EngineSpec(size=size, precision=precision) for size in sweep.sizes for precision in sweep.precisions]
    everything += [EngineSpec(size=entry.size, precision=entry.precision) for entry in sweep.extra]
    found = [spec for spec in everything if all(getattr(spec, key) in values for key, values in (only or {}).items())]
    if not found:
        asked = ",".join(f"{key}={value}" for key, values in (only or {}).items() for value in values)
        raise ValueError(
            f"--only {asked}: {sweep.name} has no such engine; lowbit throughput {sweep.name} --dry-run lists all"
        )
    return found


def read_only(text: str | None) -> dict[str, list[str]]:
    """`size=7b,precision=int8` as key -> values. Raises ValueError for another key or an unknown value."""
    found: dict[str, list[str]] = {}
    for part in filter(None, (text or "").split(",")):
        key, _, value = part.partition("=")
        if key not in ONLY or not value:
            raise ValueError(f"--only {part}: size=NAME or precision=NAME is expected")
        if value not in ONLY[key]:
            raise ValueError(f"--only {part}: {nearest(value, ONLY[key])}")
        found.setdefault(key, []).append(value)
    return found


def missing(sweep: Sweep, spec: EngineSpec, record: Mapping[str, Any] | None) -> list[str]:
    """Measurements that an engine's result file lacks, by key: cells, "prefill", "breakdown/B", "pair", or "check".

    A disturbed cell is lacking until it has been measured again often enough (`harness.studies.throughput.settled`).
    """
    found: Mapping[str, Any] = record or {}
    if spec.check is not None:
        check = found.get("check", {})
        is_done = bool(check) and ("seconds" not in check or "windows" in check)  # without them it explains nothing
        return [] if is_done or "skipped" in found else ["check"]
    if "skipped" in found:
        return []
    done: Mapping[str, Any] = found.get("cells", {})
    again = doubtful(found)
    keys = [cell_key(*cell) for cell in cells(sweep) if cell_key(*cell) not in done or cell in again]
    keys += [f"breakdown/{batch}" for batch in sweep.breakdown if str(batch) not in found.get("breakdown", {})]
    if sweep.prefill_tokens and "prefill" not in found:
        keys.append("prefill")
    if any((pair.size, pair.precision) == (spec.size, spec.precision) for pair in sweep.pairs) and "pair" not in found:
        keys.append("pair")
    return keys


def todo(
    sweep: Sweep, records: Mapping[str, Mapping[str, Any]], wanted: Sequence[EngineSpec], *, is_retried: bool = False
) -> list[EngineSpec]:
    """The engines that lack something; those that died are among them with `is_retried` alone."""
    return [
        spec
        for spec in wanted
        if missing(sweep, spec, record := records.get(spec.stem, {})) and (is_retried or "failed" not in record)
    ]
