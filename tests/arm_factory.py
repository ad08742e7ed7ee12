"""Synthetic arms with numbers chosen by hand, for the tests of figures: what differs between seeds is known exactly."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from harness.records.run_result import EvalRecord, RunResult, write_result
from tests import result_factory as factory

STEPS = 40
SIZES = {"xs": (2, 32), "s": (4, 64), "m": (6, 128), "l": (8, 256), "s128": (4, 256)}
Runs = list[tuple[RunResult, list[dict[str, Any]]]]


def run(
    sweep: str,
    method: str,
    precision: str = "bf16",
    *,
    auc: float = 0.7,
    start: float = 0.4,
    k3: tuple[float, float] = (1e-3, 1e-3),
    speed: float = 1e4,
    columns: dict[str, float] | None = None,
    seeds: int = 2,
    knobs: dict[str, Any] | None = None,
    **changes: Any,
) -> Runs:
    """An arm: reference accuracy `auc` and rollout accuracy `auc - 0.1` after the last step, k3 from first to last."""
    return [
        _run(sweep, method, precision, auc, start, k3, speed, columns or {}, seed, {"knobs": knobs or {}} | changes)
        for seed in range(seeds)
    ]


def _run(
    sweep: str, method: str, precision: str, auc: float, start: float, k3: tuple[float, float], speed: float,
    columns: dict[str, float], seed: int, changes: dict[str, Any],
) -> tuple[RunResult, list[dict[str, Any]]]:  # fmt: skip
    values = factory.config(method, precision, "decoupled", seed, seed, trainer__steps=STEPS, **changes)
    layers, width = SIZES[values["model"]["name"]]
    values["model"] |= {
        "num_layers": layers, "hidden_size": width, "num_heads": 4, "num_kv_heads": 2, "head_dim": width // 4,
        "intermediate_size": 3 * width, "vocab_size": 32,
    }  # fmt: skip
    shift = 0.01 * seed  # every arm moves with its seed, so that pairing has something to remove
    series = [
        {
            "step": float(i),
            "mismatch/kl_k3": k3[0] * (k3[1] / k3[0]) ** (i / (STEPS - 1)) * (1 + seed),
            "reward/accuracy": 0.5,
            "train/entropy": 0.3,
        }
        | {name: value * (1 + seed) for name, value in columns.items()}
        for i in range(STEPS)
    ]
    records = [
        EvalRecord(step=step, precision="fp32", site=site, accuracy=value + shift, question_hash="q")
        for step, level in ((0, start), (STEPS, auc))
        for site, value in (("reference", level), ("rollout", level - 0.1))
    ]
    run_id = hashlib.sha256(repr((sweep, values)).encode()).hexdigest()[:12]
    done = RunResult(
        run_id=run_id, name=f"{method}-{precision}", sweep=sweep, status="ok", config=values, method={"name": method},  # pyright: ignore
        seed=seed, base_seed=seed, tokens_per_s={"rollout": speed * (1 + seed)}, num_steps=STEPS, evals=records,
        summary={"k3_median": math.sqrt(k3[0] * k3[1]) * (1 + seed), "reward_last": 0.5},
    )  # fmt: skip
    return done, series


def write(results: Path, runs: Runs) -> Path:
    for result, series in runs:
        write_result(results / "runs" / result.sweep, result, series)
    return results
