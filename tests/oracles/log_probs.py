"""The random batches that the loss oracles answer for: numpy only, so that every oracle environment can run it.

Each script beside this one stores the batches together with its library's answers, so a change here needs all of them
to be run again. Axes: B sequences, T response tokens; float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 20261122
GROUP = 4
"""Samples of one prompt."""
SPREADS = {"near": 0.02, "int4": 0.4, "wild": 1.5}
"""Batch name -> standard deviation of the log-ratio between trainer and sampler, nats."""

Batch = dict[str, NDArray[Any]]


def batches(rows: int = 8, width: int = 10) -> dict[str, Batch]:
    """By name: mask [B, T] int64, rollout, old, logp (current), ref [B, T] nats, scores [B], group [B] int64."""
    found: dict[str, Batch] = {}
    for i, (name, spread) in enumerate(SPREADS.items()):
        rng = np.random.default_rng([SEED, i])
        lengths = rng.integers(1, width + 1, rows)
        lengths[0] = width
        rollout = -np.abs(rng.standard_normal((rows, width))) - 0.01
        old = np.minimum(rollout + spread * rng.standard_normal((rows, width)), -1e-4)
        logp = np.minimum(old + 0.25 * rng.standard_normal((rows, width)), -1e-4)
        found[name] = {
            "mask": (np.arange(width) < lengths[:, None]).astype(np.int64),
            "rollout": rollout,
            "old": old,
            "logp": logp,
            "ref": logp + 0.3 * rng.standard_normal((rows, width)),
            "scores": rng.standard_normal(rows) if i else rng.integers(0, 2, rows).astype(np.float64),
            "group": np.repeat(np.arange(rows // GROUP), GROUP),
        }
        found[name]["adv"] = np.repeat(rng.standard_normal((rows, 1)), width, 1)
    return found


def save(name: str, version: str, answers: dict[str, dict[str, Any]]) -> None:
    """Write <name>.npz beside this file: the batches, the version, arrays as "case/field", numbers as JSON by case."""
    arrays = {f"{batch}/{field}": value for batch, fields in batches().items() for field, value in fields.items()}
    numbers: dict[str, dict[str, float]] = {}
    for case, fields in answers.items():
        for field, value in fields.items():
            if isinstance(value, np.ndarray):
                arrays[f"{case}/{field}"] = value
            else:
                numbers.setdefault(case, {})[field] = float(value)
    path = Path(__file__).with_name(f"{name}.npz")
    np.savez_compressed(path, version=np.array(version), numbers=np.array(json.dumps(numbers)), **arrays)
    print(f"{path.name}: {len(answers)} cases of {name} {version}, {path.stat().st_size} bytes")
