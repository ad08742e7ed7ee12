"""Synthetic runs on a known curve: no loss up to a dose of 0.1, then SLOPE for each power of ten of the dose."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.records.packed import pack
from harness.records.run_result import RunResult, write_result
from harness.studies.dose.points import DOSE, K3, LENGTH, START, Point
from tests import result_factory as factory

SLOPE = 0.2
FREE = 0.1
"""Dose up to which nothing is lost."""
BORNE = {"none": 1.0, "TIS": 4.0}
"""Correction -> times the dose that it bears."""
METHODS = {"none": "naive", "TIS": "flashrl"}
FORMATS = ("int8", "fp8_block", "nvfp4", "int4")
STEPS = 12
PLACES = (("xs", 8), ("s", 8), ("s", 16), ("m", 64))
"""Size and length of the bases, in turn."""


def lost(dose: float, correction: str = "none") -> float:
    """The curve."""
    return max(0.0, SLOPE * math.log10(dose / BORNE[correction] / FREE))


def dose_at(loss: float, correction: str = "none") -> float:
    """Its inverse, for losses above 0."""
    return FREE * BORNE[correction] * 10 ** (loss / SLOPE)


def point(loss: float, dose: float, base: str = "b0", **values: Any) -> Point:
    """A run by hand."""
    plain: dict[str, Any] = {
        "run_id": f"{base} {dose} {loss}", "correction": "none", "task": "sort", "precision": "int4", "length": 8,
        "size": "s", "engine": "embedded", "has_collapsed": False,
        "doses": {DOSE: dose, START: dose, "length alone": 8.0},
    }  # fmt: skip
    return Point(loss=loss, base=base, **(plain | values))


def cloud(
    num_bases: int = 12, noise: float = 0.005, corrections: Sequence[str] = ("none", "TIS"), bumps: float = 0.0
) -> list[Point]:
    """Runs of four formats on every base, doses 0.01 to 30, with an error that a base's runs share. `bumps`: what
    int4 loses beyond the curve."""
    rng = np.random.default_rng(5)
    found: list[Point] = []
    for number in range(num_bases):
        size, length = PLACES[number % len(PLACES)]
        shared = noise * rng.standard_normal()
        for correction in corrections:
            for turn, precision in enumerate(FORMATS):
                dose = 10 ** float(rng.uniform(-2, 1.5))
                loss = lost(dose, correction) + shared + noise / 2 * float(rng.standard_normal())
                one = point(
                    loss + bumps * (precision == "int4"), dose, f"{size} sort {length} {number}",
                    run_id=f"{number} {correction} {turn}", precision=precision, size=size, length=length,
                    correction=correction,
                    doses={
                        DOSE: dose, START: dose * 1.2, "length alone": float(length), "k3 alone": dose / length,
                        "unknown": math.nan,
                    },
                )  # fmt: skip
                found.append(one)
    return found


def run(
    sweep: str, method: str, precision: str, *, auc: float, k3: float = 1e-3, length: float = 9.0, seed: int = 0,
    end: float | None = None, status: str = "ok", profile: bool = True, started: str = "2026-01-01T00:00:00+00:00",
    run_id: str = "", **changes: Any,
) -> tuple[RunResult, list[dict[str, Any]]]:  # fmt: skip
    """A run and its series: k3 alternates around its median, accuracy goes from 0.4 to `end`."""
    values = factory.config(method, precision, base_seed=seed, seed=seed, **changes)
    rows = [
        {"step": float(i), K3: k3 * (0.5 if i % 2 else 1.5), LENGTH: length, "mismatch/kl_k1": -k3,
         "mismatch/logp_absdiff_mean": math.sqrt(k3), "mismatch/ess_token_raw": 0.9, "mismatch/chi2_token": 2 * k3}
        | ({"by_entropy/entropy": [0.0, 0.1, 1.0], "by_entropy/k3": [0.0, k3, 3 * k3],
            "by_entropy/count": [80.0, 10.0, 10.0]} if profile else {})
        for i in range(STEPS)
    ]  # fmt: skip
    result = RunResult(
        run_id=run_id or hashlib.sha256(repr(values).encode()).hexdigest()[:12], name=f"{method}-{precision}-s{seed}",
        sweep=sweep, status=status, config=values, method={"name": method}, seed=seed, base_seed=seed,  # pyright: ignore
        num_steps=STEPS, started_at=started,
        summary={"auc": auc, "auc_rollout": auc - 0.1, "base_accuracy": 0.4,
                 "final_accuracy": auc if end is None else end},
    )  # fmt: skip
    return result, rows


def keep(results: Path, sweep: str, runs: Sequence[tuple[RunResult, list[dict[str, Any]]]]) -> Path:
    """Write the runs of a sweep and pack them; the results folder."""
    for result, rows in runs:
        write_result(results / "runs" / sweep, result, rows)
    pack(results, sweep)
    return results


def curved_sweep(results: Path, sweep: str = "curved", task: str = "sort", seeds: int = 8, **changes: Any) -> Path:
    """A packed sweep on the curve: four sizes and lengths, two corrections, a dose for every format and seed."""
    rng = np.random.default_rng(3)
    runs = list[tuple[RunResult, list[dict[str, Any]]]]()
    for seed in range(seeds):
        size, length = PLACES[seed % len(PLACES)]
        own: dict[str, Any] = {"model__name": size, "task__n": length, "task__name": task} | changes
        level = 0.7 + 0.01 * seed
        runs.append(run(sweep, "bf16", "bf16", auc=level, k3=1e-5, seed=seed, **own))
        for correction, method in METHODS.items():
            for turn, precision in enumerate(FORMATS):
                dose = 0.01 * 10 ** (turn + float(rng.uniform(0, 0.8)))
                runs.append(
                    run(
                        sweep, method, precision, auc=level - lost(dose, correction), k3=dose / (length + 1),
                        length=length + 1, seed=seed, **own,
                    )
                )  # fmt: skip
    return keep(results, sweep, runs)
