"""k3 of our stand-ins before any training: at the first step of committed uncorrected runs, and of committed probes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.records.packed import read_packed, read_packed_series
from harness.records.paths import packed_path, probes_folder
from harness.records.run_result import RunResult
from harness.studies.break_even.costs import num_parameters
from harness.studies.probe.record import read

SWEEPS = ("main_wordmath", "wordmath_first", "dose_words", "main_h200")
"""Packed sweeps whose runs are the stand-ins'."""
PLAIN = ("bf16", "fp16", "naive")
"""Methods that change neither weights nor sampler."""
K3, ENTROPY, LENGTH = "mismatch/kl_k3", "train/entropy", "rollout/length_mean"
PROFILES = ("by_entropy/entropy", "by_entropy/k3", "by_entropy/count", "by_position/position", "by_position/k3",
            "by_position/count")  # fmt: skip
CERTAIN = 0.1
"""Entropy of the trainer, nats, below which a token is all but certain."""
Profile = tuple[tuple[float, float, float], ...]
"""(lower edge or position, k3, tokens) of every bucket."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Setting of a mismatch: what one row of the table stands for."""

    task: str
    n: int | None
    parameters: float
    spread: float
    engine: str
    format: str

    @property
    def place(self) -> tuple[str, int | None, float, float, str, str]:
        """Task, length, size, spread, engine and format."""
        return self.task, self.n, self.parameters, self.spread, self.engine, self.format


@dataclass(frozen=True, kw_only=True)
class Measured(Place):
    """One run or one row of a probe."""

    base: str
    k3: float
    length: float
    entropy: float
    """Mean entropy of the trainer, nats a token; NaN where the record has none."""
    by_entropy: Profile
    by_position: Profile
    source: str


@dataclass(frozen=True, kw_only=True)
class Row(Place):
    """Medians over the records of a place."""

    k3: float
    k3_low: float
    k3_high: float
    length: float
    entropy: float
    certain_share: float
    """Share of the sum of k3 on tokens whose entropy is below CERTAIN; NaN where the records have no profile."""
    num_records: int
    num_bases: int
    sources: tuple[str, ...]


def measured(results: Path) -> list[Measured]:
    """Everything committed, sweeps first. Raises ValueError for a damaged file, and where nothing is there."""
    found = [one for name in SWEEPS if packed_path(results, name).exists() for one in of_sweep(results, name)]
    for path in sorted(probes_folder(results).glob("*.json")):
        found += of_probe(read(path))
    if not found:
        raise ValueError(f"{results}: none of {', '.join(SWEEPS)} is packed and there is no probe")
    return found


def of_sweep(results: Path, name: str) -> list[Measured]:
    """The uncorrected runs of a packed sweep that took a step."""
    path = packed_path(results, name)
    series = read_packed_series(path, (K3, ENTROPY, LENGTH, *PROFILES))
    runs = [run for run in read_packed(path) if run.config["method"] in PLAIN]
    return [_of_run(run, name, columns) for run in runs if (columns := series.get(run.run_id)) and _is_there(columns)]


def _is_there(columns: Mapping[str, Sequence[Any]]) -> bool:
    return bool(columns[K3]) and math.isfinite(columns[K3][0])


def _of_run(run: RunResult, sweep: str, columns: Mapping[str, Sequence[Any]]) -> Measured:
    config = run.config
    return Measured(
        task=config["task"]["name"], n=config["task"]["n"], parameters=float(num_parameters(run) or math.nan),
        spread=float(config["model"].get("spread", 0.0)), engine=config["engine"]["name"],
        format=config["precision"]["name"], base=str(run.hashes.get("model") or f"{sweep} {config['base_seed']}"),
        k3=columns[K3][0], length=columns[LENGTH][0], entropy=columns[ENTROPY][0],
        by_entropy=_profile(columns, "by_entropy", "entropy"), by_position=_profile(columns, "by_position", "position"),
        source=sweep,
    )  # fmt: skip


def _profile(columns: Mapping[str, Sequence[Any]], group: str, axis: str) -> Profile:
    """The profile of the first step; empty where there is none."""
    parts = [columns.get(f"{group}/{name}") for name in (axis, "k3", "count")]
    if any(not part or not isinstance(part[0], list) for part in parts):
        return ()
    edges, k3, count = ([float(x) for x in part[0]] for part in parts if part)
    return tuple(row for row in zip(edges, k3, count, strict=True) if row[2] > 0 and math.isfinite(row[1]))


def of_probe(record: Mapping[str, Any]) -> list[Measured]:
    """The rows of a probe of trained weights; the floor's second sample is left out."""
    if record["is_untrained"]:
        return []
    config = record["config"]
    return [
        Measured(
            task=config["task"]["name"], n=config["task"]["n"], parameters=float(row["num_parameters"]),
            spread=float(config["model"]["spread"]), engine=config["engine"]["name"], format=row["precision"],
            base=record["hashes"]["model"], k3=row["mismatch"]["kl_k3"], length=row["length_mean"], entropy=math.nan,
            by_entropy=_buckets(row["by_entropy"], "entropy"), by_position=_buckets(row["by_position"], "position"),
            source=f"probe {record['id']}",
        )
        for row in record["formats"] if row["seed"] == 0
    ]  # fmt: skip


def _buckets(profile: Mapping[str, Sequence[float | None]], axis: str) -> Profile:
    rows = zip(profile[axis], profile["k3"], profile["count"], strict=True)
    return tuple((float(e or 0), float(k), float(c)) for e, k, c in rows if k is not None and c)


def rows_of(found: Sequence[Measured]) -> list[Row]:
    """One row a place, by task, length, size and k3."""
    places = dict.fromkeys(one.place for one in found)
    rows = [_row([one for one in found if one.place == place]) for place in places]
    return sorted(rows, key=lambda r: (r.task, r.n or 0, r.parameters, r.spread, r.engine, r.k3))


def _row(own: Sequence[Measured]) -> Row:
    one, k3 = own[0], [m.k3 for m in own]
    entropies = [m.entropy for m in own if math.isfinite(m.entropy)]
    shares = [certain_share(m.by_entropy) for m in own if m.by_entropy]
    return Row(
        task=one.task, n=one.n, parameters=one.parameters, spread=one.spread, engine=one.engine, format=one.format,
        k3=median(k3), k3_low=min(k3), k3_high=max(k3), length=median(m.length for m in own),
        entropy=median(entropies) if entropies else math.nan, certain_share=median(shares) if shares else math.nan,
        num_records=len(own), num_bases=len({m.base for m in own}),
        sources=tuple(dict.fromkeys(m.source for m in own)),
    )  # fmt: skip


def certain_share(profile: Profile) -> float:
    """Share of the sum of k3 in buckets of entropy that begin below CERTAIN; NaN where the sum is 0."""
    total = sum(k3 * count for _, k3, count in profile)
    certain = sum(k3 * count for edge, k3, count in profile if edge < CERTAIN)
    return certain / total if total > 0 else math.nan


def pooled(found: Sequence[Measured], edges: Sequence[float], *, by: str) -> list[tuple[float, float]]:
    """(k3, tokens) of every bucket [edge, next edge) over records, from their profiles `by` "entropy" or "position";
    NaN where a bucket is empty."""
    sums = [[0.0, 0.0] for _ in edges]
    for one in found:
        for edge, k3, count in one.by_entropy if by == "entropy" else one.by_position:
            place = max((i for i, low in enumerate(edges) if edge >= low), default=None)
            if place is not None:
                sums[place][0] += k3 * count
                sums[place][1] += count
    return [(total / count if count else math.nan, count) for total, count in sums]
