"""Synthetic results for the tests of everything downstream of a run: numbers of the size that real runs give."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from harness.records.run_result import EvalRecord, RunResult, summarise

NUM_QUESTIONS = 512
MISMATCH = {"bf16": 8e-5, "int8": 1.4e-3, "fp8_block": 5e-3, "nvfp4": 0.055, "int4": 0.22, "int3": 1.5}
LOSS = {"bf16": 0.0, "int8": 0.006, "fp8_block": 0.02, "nvfp4": 0.11, "int4": 0.19, "int3": 0.30}
"""Final accuracy lost to the format without a correction."""
QUICK = (
    ("bf16", "bf16", "decoupled"),
    ("naive", "int8", "decoupled"),
    ("naive", "fp8_block", "decoupled"),
    ("naive", "nvfp4", "decoupled"),
    ("flashrl", "nvfp4", "decoupled"),
    ("naive", "int4", "decoupled"),
    ("flashrl", "int4", "decoupled"),
    ("naive", "int4", "bypass_ppo"),
)
"""(method, precision, correction mode) of the arms of a small sweep."""


def config(
    method: str, precision: str, mode: str = "decoupled", base_seed: int = 0, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """A resolved config; `changes` are dotted names with double underscores (`model__name="m"`)."""
    cap = {"TIS": {"cap": 2.0}} if method == "flashrl" else {}
    values: dict[str, Any] = {
        "method": method,
        "parts": [],
        "knobs": cap,
        "precision": {"name": precision, "weights": precision, "acts": None, "kv": None},
        "model": {"name": "s", "num_layers": 4, "hidden_size": 64, "spread": 0.5, "rl_lr": 3e-4, "path": None},
        "task": {"name": "sort", "n": 8, "num_eval": NUM_QUESTIONS},
        "algo": {"name": "grpo", "mode": mode, "loss": "ppo", "num_minibatches": 1, "num_prompts": 32, "group_size": 8},
        "engine": {"name": "embedded"},
        "trainer": {"name": "local", "steps": 80, "lr": 3e-4, "eval_every": 20},
        "base_seed": base_seed,
        "seed": seed,
    }
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        values[section] = {**values.get(section, {}), leaf: value} if leaf else value
    return values


def curve(values: dict[str, Any], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """True accuracy in the (reference, rollout) format after every step, [steps + 1] each."""
    steps, precision = values["trainer"]["steps"], values["precision"]["name"]
    lost = LOSS.get(precision, 0.3) * (0.5 if values["method"] == "flashrl" else 1.0)
    base = 0.42 + 0.04 * np.random.default_rng(values["base_seed"]).standard_normal()
    final = 0.85 - lost + 0.015 * rng.standard_normal()
    if values["algo"]["mode"] == "bypass_ppo":
        final = 0.2
    t = np.arange(steps + 1) / steps
    reference = base + (final - base) * (1 - np.exp(-4 * t)) / (1 - math.exp(-4))
    start = base * math.exp(-2.5 * LOSS.get(precision, 0.3))
    gap = 0.6 * LOSS.get(precision, 0.3) * (1 if values["method"] == "naive" else -1)
    rollout = reference + (start - base) * (1 - t) + gap * t
    return reference, np.clip(rollout, 0.01, 0.99)


def series(values: dict[str, Any], rng: np.random.Generator, rollout: np.ndarray) -> list[dict[str, Any]]:
    """The metrics of every step."""
    k3 = MISMATCH.get(values["precision"]["name"], 1.0)
    rows: list[dict[str, Any]] = []
    for step in range(values["trainer"]["steps"]):
        level = k3 * math.exp(0.2 * rng.standard_normal())
        reward = float(np.clip(rollout[step] + 0.03 * rng.standard_normal(), 0, 1))
        profile = [level * (0.6 + 0.1 * position) for position in range(9)]
        rows.append(
            {
                "step": float(step),
                "reward/mean": reward,
                "reward/accuracy": reward,
                "mismatch/kl_k1": level * 1.1,
                "mismatch/kl_k3": level,
                "mismatch/ess_token": 1 / (1 + level),
                "mismatch/ess_token_raw": 1 / (1 + 2 * level),
                "train/entropy": 0.4 - 0.3 * step / values["trainer"]["steps"] + level / 10,
                "train/grad_norm": 0.8 + 0.1 * rng.standard_normal(),
                "rollout/tokens_per_s": 4e4,
                "by_position/position": [float(position) for position in range(9)],
                "by_position/k3": profile,
                "by_position/absdiff": [0.1] * 9,
                "by_position/count": [256.0] * 9,
                "by_entropy/entropy": [0.0, 0.01, 0.1, 1.0],
                "by_entropy/k3": [level * scale for scale in (0.1, 0.5, 1.5, 2.0)],
                "by_entropy/absdiff": [0.1] * 4,
                "by_entropy/count": [1500.0, 400.0, 200.0, 204.0],
            }
        )
    return rows


def evaluations(
    values: dict[str, Any], rng: np.random.Generator, curves: dict[str, np.ndarray], last: int
) -> list[EvalRecord]:
    """Answers at both sites up to step `last`. The questions' difficulty is shared by all runs."""
    difficulty = np.random.default_rng(7).standard_normal(values["task"]["num_eval"])
    records: list[EvalRecord] = []
    for step in range(0, last + 1, values["trainer"]["eval_every"]):
        for site, curve in curves.items():
            odds = math.log(curve[step] / (1 - curve[step]))
            correct = (rng.random(len(difficulty)) < 1 / (1 + np.exp(-(1.15 * odds + difficulty)))).astype(int)
            records.append(
                EvalRecord(
                    step=step,
                    precision="fp32" if site == "reference" else values["precision"]["name"],
                    site=site,  # pyright: ignore[reportArgumentType]
                    accuracy=float(correct.mean()),
                    correct=correct.tolist(),
                    question_hash=f"sort-{values['task']['n']}",
                    length_mean=9.0,
                    truncated_frac=0.0,
                    unparsable_frac=0.0,
                )
            )
    return records


def result(
    method: str = "bf16",
    precision: str = "bf16",
    mode: str = "decoupled",
    seed: int = 0,
    status: str = "ok",
    sweep: str = "quick",
    **changes: Any,
) -> tuple[RunResult, list[dict[str, Any]]]:
    """A run and its series; base seed and seed vary together. Diverged runs stop at step 30, others never started."""
    values = config(method, precision, mode, seed, seed, **changes)
    run_id = hashlib.sha256(repr(values).encode()).hexdigest()[:12]
    rng = np.random.default_rng(int(run_id, 16))
    reference, rollout = curve(values, rng)
    rows, evals = series(values, rng, rollout), list[EvalRecord]()
    if status in ("ok", "diverged"):
        last = values["trainer"]["steps"] if status == "ok" else 30
        rows, evals = rows[:last], evaluations(values, rng, {"reference": reference, "rollout": rollout}, last)
    else:
        rows = []
    fields = {
        "run_id": run_id,
        "name": f"{method}-{precision}-{mode}-s{seed}",
        "sweep": sweep,
        "status": status,
        "reason": None if status == "ok" else f"{status} for the test",
        "config": values,
        "method": {"name": method, "paper": "arXiv 0000.00000", "parts": values["knobs"]},
        "seed": seed,
        "base_seed": seed,
        "commit": "0" * 40,
        "packages": {"torch": "2.13.0"},
        "hardware": {"cpu": "a CPU", "gpu": None, "num_threads": 1},
        "hashes": {"model": "aa", "task": "bb"},
        "time_s": {"generate": 6.0, "update": 8.0, "eval": 2.0, "total": 19.0},
        "tokens_per_s": {"rollout": 4e4, "end_to_end": 9e3},
        "peak_memory_gib": 0.5,
        "num_steps": len(rows),
        "evals": evals,
        "summary": summarise(rows, evals),
        "started_at": "2026-01-01T00:00:00+00:00",
        "ended_at": "2026-01-01T00:00:19+00:00",
    }
    return RunResult(**fields), rows


def sweep_results(
    arms: tuple[tuple[str, str, str], ...] = QUICK, seeds: int = 3
) -> list[tuple[RunResult, list[dict[str, Any]]]]:
    """Every arm at every seed."""
    return [result(method, precision, mode, seed) for method, precision, mode in arms for seed in range(seeds)]


def replicated(lost: dict[int, int], replicates: int = 3) -> list[RunResult]:
    """A control with 75 or 76 of 100 answers right in several runs a base, and INT8 with so many fewer in one; at the
    start 40 are right."""
    found: list[RunResult] = []
    for base, fewer in lost.items():
        control = [75 + seed % 2 for seed in range(replicates)]
        for method, precision, right in (("bf16", "bf16", control), ("naive", "int8", [75 - fewer])):
            for seed, count in enumerate(right):
                evals = [
                    EvalRecord(
                        step=step, precision="fp32", site=site, accuracy=rate / 100, question_hash="q",
                        correct=[1] * rate + [0] * (100 - rate),
                    )
                    for step, rate in ((0, 40), (40, count), (80, count)) for site in ("reference", "rollout")
                ]  # fmt: skip
                changes = {"base_seed": base, "run_id": f"{method}{base}-{seed}", "evals": evals}
                found.append(result(method, precision, seed=seed)[0].model_copy(update=changes))
    return found
