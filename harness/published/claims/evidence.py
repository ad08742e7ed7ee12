"""The runs that decide claims: read from the packed sweep where there is one, so that every checkout sees the same.

A sweep that is packed in the repository counts as packed, another as its folder of runs. Nothing is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness.foundation.progress_bar import progress_bar
from harness.published.claims.kinds import SCORES, Settings
from harness.records import stats
from harness.records.arms import setting, shown
from harness.records.folder import load_series, read_place
from harness.records.looks import level_of
from harness.records.packed import read_packed_series
from harness.records.paths import packed_path, runs_folder
from harness.records.run_result import SUMMARY, Base, Pair, RunResult, accuracies
from harness.records.statuses import FINISHED
from harness.report.scores import answers

Columns = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The scored runs of one sweep, arm by arm, with the series columns that were asked for."""

    arms: tuple[tuple[Settings, tuple[RunResult, ...]], ...] = ()
    """(setting without seeds and places, its runs)."""
    series: Mapping[str, Columns] = field(default_factory=dict[str, Columns])
    """Run id -> column -> value per step."""
    level: float = stats.LEVEL
    """Level of intervals: above 0.95 where the sweep was enlarged after somebody had read its verdicts."""
    scores: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """(run id, score) -> value, of those that were asked for: every claim on a sweep asks for most."""


def load(results: Path, needs: Mapping[str, Collection[str]]) -> dict[str, Evidence]:
    """Sweep -> its evidence, empty where the sweep has no results; `needs` names the columns of the series.

    Raises ValueError naming a damaged file.
    """
    return {sweep: _load(results, sweep, sorted(columns)) for sweep, columns in progress_bar(needs.items(), "sweep")}


def _load(results: Path, sweep: str, columns: Sequence[str]) -> Evidence:
    packed = packed_path(results, sweep)
    place = packed if packed.is_file() else runs_folder(results, sweep)
    runs = read_place(place)
    level = 1 - level_of(results, sweep, 1 - stats.LEVEL)
    if not columns:
        return Evidence(arms=in_arms(runs), level=level)
    series = read_packed_series(place, columns) if place == packed else load_series(place, runs)
    return Evidence(arms=in_arms(runs), series=series, level=level)


def in_arms(runs: Sequence[RunResult]) -> tuple[tuple[Settings, tuple[RunResult, ...]], ...]:
    """The scored runs by their setting."""
    found: dict[str, tuple[Settings, list[RunResult]]] = {}
    for run in runs:
        if run.status in FINISHED:
            own = setting(run)
            found.setdefault(json.dumps(own, sort_keys=True), (own, []))[1].append(run)
    return tuple((own, tuple(group)) for own, group in found.values())


def select(evidence: Evidence, wanted: Settings) -> Sequence[RunResult]:
    """The runs of the one setting that has all values of `wanted`; none where no run has them. A null stands for a
    field that records leave out at its default, such as `algo.staleness`.

    Raises ValueError, naming what they differ in, where several settings have them.
    """
    matching = [
        (own, runs) for own, runs in evidence.arms if all(own.get(name) == value for name, value in wanted.items())
    ]
    if len(matching) > 1:
        names = {name for own, _ in matching for name in own}
        differ = sorted(name for name in names if len({json.dumps(own.get(name)) for own, _ in matching}) > 1)
        raise ValueError(f"{words(wanted)}: {len(matching)} settings have these; name one of {', '.join(differ)}")
    return matching[0][1] if matching else ()


def grouped(evidence: Evidence, wanted: Settings, along: str) -> dict[float, Sequence[RunResult]]:
    """Value of the numeric setting `along` -> the runs of `wanted` there."""
    values = {own[along] for own, _ in evidence.arms if isinstance(own.get(along), int | float)}
    found = {float(value): select(evidence, {**wanted, along: value}) for value in sorted(values)}
    return {value: runs for value, runs in found.items() if runs}


def words(settings: Settings) -> str:
    """Settings as they are read: method and precision first, then what else is set."""
    others = [f"{_short(k)}={_plain(v)}" for k, v in settings.items() if k not in ("method", "precision.name")]
    return " ".join([*(str(settings[k]) for k in ("method", "precision.name") if k in settings), *others])


def _short(name: str) -> str:
    return {"task.n": "n", "model.name": "size", "algo.mode": "mode"}.get(name, name.removeprefix("knobs."))


def _plain(value: Any) -> str:
    return "none" if value is None or value == [] else shown(value)


def numbers(
    evidence: Evidence, runs: Sequence[RunResult], metric: str, reduce: str, by_seeds: bool = False
) -> dict[Pair, float]:
    """Pair -> the run's number; runs without one are left out. `by_seeds`: as `pair_of`."""
    found = {pair_of(run, by_seeds): number(evidence, run, metric, reduce) for run in runs}
    return {pair: value for pair, value in found.items() if math.isfinite(value)}


def pair_of(run: RunResult, by_seeds: bool) -> Pair:
    """Base and seed of a run. `by_seeds`: the base by its seed alone, for arms that cannot start from one base."""
    return (Base(run.base_seed), run.seed) if by_seeds else run.pair


def number(evidence: Evidence, run: RunResult, metric: str, reduce: str) -> float:
    """One number of a run: a score, an entry of its summary, or a reduced column. NaN where it has none."""
    if metric in SCORES:
        place = (run.run_id, metric)
        if place not in evidence.scores:
            evidence.scores[place] = _score(run, metric)
        return evidence.scores[place]
    if metric in SUMMARY:
        value = run.summary.get(metric)
        return math.nan if value is None else value
    values = steps(evidence, run, metric)
    return REDUCTIONS[reduce](values) if values else math.nan


def steps(evidence: Evidence, run: RunResult, metric: str) -> list[float]:
    """The finite values of a column."""
    return [float(v) for v in evidence.series.get(run.run_id, {}).get(metric, ()) if math.isfinite(v)]


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean, "median": median, "max": max, "min": min,
    "first": lambda values: fmean(values[:5]), "last": lambda values: fmean(values[-5:]),
}  # fmt: skip


def _score(run: RunResult, metric: str) -> float:
    """Evaluations as the leaderboard counts them: 0 where a diverged run did not arrive."""
    site = "rollout" if "rollout" in metric else "reference"
    kind = metric.replace("rollout_", "")
    if kind == "reward":
        reward = 0.0 if run.status == "diverged" else run.summary.get("reward_last")
        return math.nan if reward is None else reward
    base = next((value for step, value in accuracies(run.evals, site) if step == 0), math.nan)
    if kind == "base_accuracy":
        return base
    after = answers(run, site)
    if not len(after):
        return math.nan
    if kind == "auc":
        return float(after.mean())
    return float(after[-1].mean()) - (base if kind == "gain" else 0.0)
