"""The runs of one sweep as compact JSON: what repeats (settings, tensors, code, machines) is written once.

A passport is a list of rows of the table `tensors`; the hashes of its tensors, 4 bytes each, follow in base64 in the
same order. A setting is the difference to the first arm's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.records.arms import setting
from harness.records.run_result import RunResult, TaskEvalRecord
from harness.viewers.site.board import number
from harness.viewers.tracking.facts import questions_of, spread_steps

SUMMARY = (
    "base_accuracy", "auc", "final_accuracy", "auc_rollout", "final_accuracy_rollout", "reward_last", "k3_max",
    "k3_median", "ess_token_raw_min", "entropy_last", "grad_norm_max", "num_nonfinite",
)  # fmt: skip
CURVES = ("reward/mean", "mismatch/kl_k3", "train/entropy")
"""Columns of the series that the page draws over the steps."""
MAX_POINTS = 24
"""Steps of a curve that the page has, evenly spaced and with the last."""
STAGES = ("generate", "reward", "sync", "old_logp", "update", "eval", "other", "total")
FIELDS = (
    "id", "arm", "seed", "base_seed", "status", "reason", "draft", "code", "machine", "model", "task", "question",
    "final", "started", "steps", "memory", "rollout_tokens_per_s", "summary", "time", "evals", "planned", "passport",
    "hashes", "method", "points", "curves",
)  # fmt: skip


class Pool:
    """Owns a list of distinct values: a value's place in it stands for the value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        """The index of an equal value, added where there is none."""
        key = json.dumps(value, sort_keys=True)
        if key not in self.places:
            self.places[key] = len(self.values)
            self.values.append(value)
        return self.places[key]


def run_entries(
    runs: Sequence[RunResult], labels: Mapping[str, str], series: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Any]:
    """Everything of a sweep's runs that the page shows when one is opened; `series`: run id -> column -> steps."""
    names = ("code", "machine", "hash", "planned", "passport", "tensors", "method", "points")
    pools = {name: Pool() for name in names}
    runs = sorted(runs, key=lambda run: (labels[run.run_id], run.base_seed, run.seed))
    arms = list(dict.fromkeys(labels[run.run_id] for run in runs))
    first = {labels[run.run_id]: setting(run) for run in reversed(runs)}
    base = first[arms[0]]
    asked = {run.run_id: [_task(record) for record in run.evaluations] for run in runs if run.evaluations}
    return {
        "fields": FIELDS,
        "summary": SUMMARY,
        "stages": STAGES,
        "curves": CURVES,
        "arms": arms,
        "base": base,
        "settings": [{k: v for k, v in first[arm].items() if k not in base or base[k] != v} for arm in arms],
        "absent": [[k for k in base if k not in first[arm]] for arm in arms],
        "runs": [_run(run, arms.index(labels[run.run_id]), pools, series.get(run.run_id, {})) for run in runs],
        **{name: pool.values for name, pool in pools.items()},
        **({"tasks": asked} if asked else {}),
    }


def _task(record: TaskEvalRecord) -> list[Any]:
    """[task, step, site, precision, samples of a question, scores by name or the error]."""
    scores = {name: number(value) for name, value in record.scores.items()}
    return [record.task, record.step, record.site, record.precision, record.k, record.error or scores]


def _run(run: RunResult, arm: int, pools: Mapping[str, Pool], series: Mapping[str, Sequence[float]]) -> list[Any]:
    passport, hashes = _passport(run, pools)
    count = max(map(len, series.values()), default=0)
    points = spread_steps(count, MAX_POINTS)
    by_step: dict[int, list[Any]] = {}
    for record in run.evals:
        by_step.setdefault(record.step, [None, None])[record.site == "rollout"] = number(record.accuracy)
    return [
        run.run_id, arm, run.seed, run.base_seed, run.status, run.reason, int(run.is_draft),
        pools["code"].place([run.commit, run.packages]), pools["machine"].place(run.hardware),
        *(pools["hash"].place(value) for value in (run.hashes.get("model"), run.hashes.get("task"), questions_of(run))),
        run.hashes.get("final"), run.started_at, run.num_steps, number(run.peak_memory_gib),
        number(run.tokens_per_s.get("rollout")), [number(run.summary.get(name)) for name in SUMMARY],
        [number(run.time_s.get(stage)) for stage in STAGES],
        [[step, *values] for step, values in sorted(by_step.items())],
        pools["planned"].place({k: v for k, v in run.planned.items() if v}), passport, hashes,
        pools["method"].place(run.method.model_dump(mode="json")), pools["points"].place(points),
        [[_single(series[name][step - 1]) for step in points] if name in series else [] for name in CURVES],
    ]  # fmt: skip


def _single(value: float) -> float | int | None:
    """A number of a curve. Packed series are float32, so all are rounded to it first: the page is then the same."""
    return number(float(np.float32(value)))


def _passport(run: RunResult, pools: Mapping[str, Pool]) -> tuple[int | None, str]:
    """(place of the realized formats, the tensors' hashes in base64)."""
    if run.passport is None:
        return None, ""
    acts = run.passport.get("acts") or {}
    tensors = [
        pools["tensors"].place([t["name"], t["format"], t["dtype"], t["scale_shape"], acts.get(t["name"])])
        for t in run.passport["weights"]
    ]
    rest = {name: run.passport.get(name) for name in ("engine", "sampler", "kv")}
    codes = b"".join(bytes.fromhex(t["hash"]) for t in run.passport["weights"])
    return pools["passport"].place(rest | {"weights": tensors}), base64.b64encode(codes).decode()
