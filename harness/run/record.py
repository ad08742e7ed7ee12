"""The result of a run that ended, diverged or failed, made from what it reached.

Left out: when it is written, and times of the whole cell (`harness.run.cell`).
"""

from __future__ import annotations

import json
from dataclasses import asdict

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
    composed = run.composed if run is not None else None
    series = run.series if run is not None else []
    evals = run.evals if run is not None else []
    time_s: dict[str, float] = {stage: sum(row.get(f"time/{stage}_s", 0.0) for row in series) for stage in STAGES}
    time_s["eval"] = run.eval_s if run is not None else 0.0
    tokens = sum(row["rollout/tokens"] for row in series)
    peak, memory = provenance.peak_memory_gib(config.trainer.device), {} if run is None else dict(run.memory_gib)
    if config.trainer.device == "cuda" and run is not None:
        memory["allocated"] = max(peak, memory.get("allocated", 0.0))
    method = {"name": config.method, "parts": config.knobs}
    if composed is not None:
        method |= {"paper": composed.method.paper, "reconstructed": composed.method.reconstructed}
        method["parts"] = {type(p).__name__: stated_knobs(p) for p in composed.parts}
    return RunResult.model_validate(
        {
            "run_id": run_id(config), "name": run_name(config), "sweep": launch.sweep, "status": status,
            "reason": reason, "is_draft": launch.is_dirty, "config": to_json(config), "method": method,
            "planned": plan_json(composed.plan) if composed is not None else {},
            "passport": None if run is None or run.passport is None else json.loads(json.dumps(asdict(run.passport))),
            "seed": config.seed, "base_seed": config.base_seed, "commit": launch.commit, "is_dirty": launch.is_dirty,
            "packages": provenance.packages(), "hardware": provenance.hardware(config.trainer.device),
            "hashes": hashes, "launch": settings(launch), "trainer": {} if run is None else run.products(),
            "time_s": time_s, "memory_gib": memory, "peak_memory_gib": memory.get("allocated", peak),
            "tokens_per_s": {
                "rollout": tokens / time_s["generate"] if time_s["generate"] else None,
                "end_to_end": tokens / sum(time_s.values()) if sum(time_s.values()) else None,
            },
            "num_steps": len(series), "evals": [e.model_dump() for e in evals], "summary": summarise(series, evals),
            "evaluations": [] if run is None else [e.model_dump() for e in run.evaluations],
            "evaluation_errors": [] if run is None else list(run.evaluation_errors),
            "retries": list(launch.retries), "error": error,
        }
    )  # fmt: skip
