"""Runs with given answers and series, for the tests of claims."""

from __future__ import annotations

import math
from typing import Any

from scipy.stats import t as student

from harness.published.claims.estimates import ClaimEstimate, estimate
from harness.published.claims.evidence import Evidence, in_arms
from harness.records.run_result import EvalRecord, RunResult
from tests import result_factory as factory

Answers = dict[int, list[int]]


def run(
    method: str = "naive", seed: int = 0, answers: Answers | None = None, base: int | None = None, **changes: Any
) -> RunResult:
    """A run of int8 (of bf16 for that method) whose evaluations are exactly `answers`: step -> right and wrong. `base`:
    its base seed, that of the run where None."""
    precision = changes.pop("precision", "bf16" if method == "bf16" else "int8")
    result, _ = factory.result(method, precision, seed=seed, sweep="standard", **changes)
    evals = [
        EvalRecord(
            step=step, precision="fp32", site=site, accuracy=sum(right) / len(right), correct=right, question_hash="q"
        )
        for step, right in (answers or {}).items()
        for site in ("reference", "rollout")
    ]
    place = {} if base is None else {"base_seed": base, "run_id": f"{base}-{result.run_id}"}
    return result.model_copy(update={"evals": evals} | place)


def of(*runs: RunResult, **columns: list[list[float]]) -> Evidence:
    """Evidence of runs, each with its row of every column; `kl_k3` stands for `mismatch/kl_k3`."""
    series = {one.run_id: {f"mismatch/{name}": rows[i] for name, rows in columns.items()} for i, one in enumerate(runs)}
    return Evidence(arms=in_arms(runs), series=series)


def found(test: Any, evidence: Evidence) -> ClaimEstimate:
    return estimate(test, {"standard": evidence}, [])


NAIVE, BF16 = {"method": "naive"}, {"method": "bf16"}
HALF = student.ppf(0.975, 2) / math.sqrt(3)
"""Half of a 95 % interval over three pairs, in standard deviations."""
