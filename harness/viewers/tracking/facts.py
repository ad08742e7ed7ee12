"""A result in the words of trackers: tags to filter by, parameters and curves. Nothing here talks to a store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from harness.foundation.time_stamp import moment
from harness.records.arms import flatten, setting
from harness.records.run_result import RunResult


class Point(NamedTuple):
    """A number of a run: its name, its value, milliseconds since 1970, and its step (0 where it belongs to none)."""

    name: str
    value: float
    milliseconds: int
    step: int


CURVES = (
    "reward/mean", "mismatch/kl_k3", "mismatch/ess_token_raw", "mismatch/logp_absdiff_max", "train/entropy",
    "train/grad_norm", "train/clip_frac", "train/loss_scale", "correction/weight_mean", "correction/token_kept_frac",
    "rollout/length_mean", "rollout/tokens_per_s", "sync/code_flip_rate",
)  # fmt: skip
"""Columns of the series that are logged, beside what a method's parts measured (`part/`). All are in the Parquet."""
SCORES = {
    "auc": "auc",
    "accuracy": "final_accuracy",
    "rollout_accuracy": "final_accuracy_rollout",
    "reward": "reward_last",
}
"""Column of the leaderboard -> its value in a run's summary: arms and cells share the names `scores/...`."""
LIVE, REBUILT = "live: the cell's process and the machine", "from the record: peak memory and seconds per stage"


def arm_key(result: RunResult) -> str:
    """8 hexadecimal digits of the run's setting without its seeds: known before the other arms are."""
    return f"{crc32(json.dumps(setting(result), sort_keys=True).encode()):08x}"


def plain_name(result: RunResult) -> str:
    """Method, precision, model, length and mode: an arm's name until the sweep is known as a whole."""
    fields = flatten(result.config)
    n, mode = fields.get("task.n"), fields.get("algo.mode")
    words = [result.method.name, fields.get("precision.name"), fields.get("model.name")]
    words += [None if n is None else f"n={n}", None if mode in (None, "decoupled") else mode]
    return " ".join(str(word) for word in words if word is not None)


def setting_tags(result: RunResult) -> dict[str, str]:
    """Tags by which cells and arms are found. `length` is the limit of a response where one is set, else the problem
    size."""
    fields = flatten(result.config)
    n, limit = fields.get("task.n"), fields.get("engine.max_new_tokens")
    values = {
        "method": result.method.name,
        "precision": fields.get("precision.name"),
        "model": fields.get("model.name"),
        "task": fields.get("task.name"),
        "n": n,
        "max_new_tokens": limit,
        "length": n if limit is None else limit,
        "mode": fields.get("algo.mode"),
        "parts": "+".join(result.method.parts) or None,
        "reconstructed": result.method.reconstructed or None,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def cell_tags(sweep: str, result: RunResult) -> dict[str, str]:
    """Everything a cell is found by, but for its arm's label."""
    values = {
        "kind": "cell",
        "lowbit.sweep": sweep,
        "lowbit.run_id": result.run_id,
        "seed": result.seed,
        "base_seed": result.base_seed,
        "status": result.status,
        "reason": result.reason,
        "commit": result.commit,
        "is_draft": str(result.is_draft).lower(),
        "model_hash": result.hashes.get("model"),
        "task_hash": result.hashes.get("task"),
        "question_hash": questions_of(result),
    }
    return setting_tags(result) | {name: str(value)[:8000] for name, value in values.items() if value is not None}


def cell_params(result: RunResult) -> dict[str, str]:
    """The resolved config with the versions that decide numbers."""
    values = {k: v for k, v in flatten(result.config).items() if v is not None}
    values |= {f"package.{name}": version for name, version in result.packages.items()}
    values |= {f"hardware.{name}": value for name, value in result.hardware.items()}
    values |= {f"launch.{name}": value for name, value in result.launch.items()}
    return {name: str(value) for name, value in values.items()}


def cell_points(result: RunResult, series: Mapping[str, Sequence[Any]], max_points: int | None) -> list[Point]:
    """Scores, summary, evaluations, curves, seconds per stage and peak memory; what was not measured is left out. At
    most `max_points` of a curve."""
    start, end = milliseconds(result.started_at) or 0, milliseconds(result.ended_at) or 0
    values = {f"scores/{name}": result.summary.get(key) for name, key in SCORES.items()}
    values |= {f"summary/{name}": value for name, value in result.summary.items()}
    values |= {f"time/{name}_s": value for name, value in result.time_s.items()}
    values |= {f"speed/{name}_tokens_per_s": value for name, value in result.tokens_per_s.items()}
    values["system/peak_memory_gib"] = result.peak_memory_gib
    values |= {f"system/{name}_gib": value for name, value in result.memory_gib.items()}
    points: list[Point] = [Point(name, value, end, 0) for name, value in values.items() if value is not None]
    for record in result.evals:
        if record.accuracy is not None:
            points.append(Point(f"eval/accuracy_{record.site}", record.accuracy, end, record.step))
    for record in result.evaluations:
        place = f"task/{record.number}_{record.task}_{record.site}"
        points += [
            Point(f"{place}/{name.replace('@', '_at_')}", value, end, record.step)
            for name, value in record.scores.items()
            if value is not None
        ]
    return points + curve_points(series, start, end, max_points)


def curve_points(series: Mapping[str, Sequence[Any]], start: int, end: int, max_points: int | None) -> list[Point]:
    """The curves among a series' columns, at most `max_points` steps of each, spread over the milliseconds from `start`
    to `end`."""
    points: list[Point] = []
    for name, column in series.items():
        if name in CURVES or name.startswith("part/"):
            points += [
                Point(name, float(column[step - 1]), start + (end - start) * step // len(column), step)
                for step in chosen_steps(column, max_points)
                if isinstance(column[step - 1], (int, float)) and math.isfinite(column[step - 1])
            ]
    return points


def mean_series(all_series: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[float]]:
    """Column -> mean over the runs at every step that all of them reached, of the curves that all of them have. Later
    steps are left out: a mean over fewer runs would jump where one ends."""
    if not all_series:
        return {}
    names = [n for n in all_series[0] if n in CURVES or n.startswith("part/")]
    shared = [n for n in names if all(n in series and _is_plain(series[n]) for series in all_series)]
    return {n: [sum(v) / len(v) for v in zip(*(series[n] for series in all_series), strict=False)] for n in shared}


def _is_plain(column: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in column)


def mean_evaluations(runs: Sequence[RunResult]) -> dict[tuple[str, int], float]:
    """(site, step) -> mean accuracy, where every run has an evaluation."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for record in run.evals:
            if record.accuracy is not None:
                found.setdefault((record.site, record.step), []).append(record.accuracy)
    return {place: sum(values) / len(values) for place, values in found.items() if len(values) == len(runs)}


def chosen_steps(column: Sequence[Any], max_points: int | None) -> list[int]:
    """The steps of a curve that are logged: all without a bound; with one `spread_steps`, and the last alone of what
    never changes."""
    count = len(column)
    if max_points is None:
        return list(range(1, count + 1))
    if all(value == column[0] for value in column):
        return [count] if count else []
    return spread_steps(count, max_points)


def spread_steps(count: int, most: int) -> list[int]:
    """At most `most` of the steps 1 to `count`, evenly spaced and with the last."""
    stride = max(1, math.ceil(count / most))
    return [step for step in range(1, count + 1) if (count - step) % stride == 0]


def questions_of(result: RunResult) -> str | None:
    """The hash of the held-out questions that were scored."""
    return next((record.question_hash for record in result.evals), None)


def milliseconds(stamp: str | None) -> int | None:
    """ISO 8601 to milliseconds since 1970."""
    return None if stamp is None else int(moment(stamp).timestamp() * 1000)
