"""The result of a run that ended, diverged or failed, made from what it reached.

Left out: when it is written, and times of the whole cell (`harness.run.cell`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from harness.api import stated_knobs
from harness.config.compose import plan_json
from harness.config.load import run_id, run_name, to_json
from harness.config.schema import Launch, RunConfig, settings
from harness.foundation import provenance
from harness.foundation.clock import STAGES
from harness.records.run_result import RunResult, summarise
from harness.run.run import Reached


def record(
    config: RunConfig, launch: Launch, run: Reached | None, hashes: dict[str, str | None], status: str,
    reason: str | None, error: str | None,
) -> RunResult:  # fmt: skip
    """The result of what was reached."""
    series, evals = ([], []) if run is None else (run.series, run.evals)
    time_s: dict[str, float] = {stage: sum(row.get(f"time/{stage}_s", 0.0) for row in series) for stage in STAGES}
    time_s["eval"] = 0.0 if run is None else run.eval_s
    tokens, total_s = sum(row["rollout/tokens"] for row in series), sum(time_s.values())
    values: dict[str, Any] = {
        "run_id": run_id(config), "name": run_name(config), "sweep": launch.sweep, "status": status,
        "reason": reason, "is_draft": launch.is_dirty, "config": to_json(config),
        "method": {"name": config.method, "parts": config.knobs},
        "seed": config.seed, "base_seed": config.base_seed, "commit": launch.commit, "is_dirty": launch.is_dirty,
        "packages": provenance.packages(), "hardware": provenance.hardware(config.trainer.device),
        "hashes": hashes, "launch": settings(launch), "time_s": time_s,
        "peak_memory_gib": provenance.peak_memory_gib(config.trainer.device),
        "tokens_per_s": {
            "rollout": tokens / time_s["generate"] if time_s["generate"] else None,
            "end_to_end": tokens / total_s if total_s else None,
        },
        "num_steps": len(series), "evals": [e.model_dump() for e in evals], "summary": summarise(series, evals),
        "retries": list(launch.retries), "error": error,
    }  # fmt: skip
    return RunResult.model_validate(values | ({} if run is None else _of_run(config, run, values["peak_memory_gib"])))


def _of_run(config: RunConfig, run: Reached, peak_gib: float) -> dict[str, Any]:
    """Fields of the record of a run that began."""
    composed, memory = run.composed, dict(run.memory_gib)
    if config.trainer.device == "cuda":
        memory["allocated"] = max(peak_gib, memory.get("allocated", 0.0))
    return {
        "method": {
            "name": config.method, "paper": composed.method.paper, "reconstructed": composed.method.reconstructed,
            "parts": {type(part).__name__: stated_knobs(part) for part in composed.parts},
        },
        "planned": plan_json(composed.plan),
        "passport": None if run.passport is None else json.loads(json.dumps(asdict(run.passport))),
        "trainer": run.products(), "memory_gib": memory, "peak_memory_gib": memory.get("allocated", peak_gib),
        "evaluations": [e.model_dump() for e in run.evaluations],
        "evaluation_errors": list(run.evaluation_errors),
    }  # fmt: skip
