"""Time of a step outside generation, scoring, updating and evaluation; and the memory of a cell at size m."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness.foundation.own_process import code_path, module_command
from harness.foundation.provenance import ROOT
from harness.records.paths import bases_folder
from harness.sweep.launchers.local import ENVIRONMENT

COUNTED = ("generate", "old_logp", "update", "eval")
STEPS = 20
"""Measured steps; three before them warm up."""


def measure(model: str, results: Path) -> dict[str, float]:
    """Share of a step outside the counted stages (CPU time is not split by stage, so this is wall), and peak GiB."""
    import torch

    from harness.config.load import load
    from harness.config.resolve import resolve
    from harness.config.schema import Launch
    from harness.foundation.provenance import peak_memory_gib
    from harness.run.build import build
    from harness.run.loop import evaluate, grpo_step

    torch.set_num_threads(1)
    config = resolve(load([f"model={model}", "method=naive", "precision=int4"]))
    run, _ = build(config, Launch(results=str(results)))
    evaluate(run)
    rows: list[dict[str, Any]] = []
    for _ in range(STEPS + 3):
        rows.append(grpo_step(run))
        run.step += 1
    stages = {name: median(row[f"time/{name}_s"] for row in rows[3:]) for name in ("reward", "sync", "other", *COUNTED)}
    total = sum(stages.values())
    return {
        "share": 1 - sum(stages[name] for name in COUNTED) / total,
        "sync": stages["sync"] / total,
        "reward": stages["reward"] / total,
        "step_s": total,
        "memory_gib": peak_memory_gib("cpu"),
    }


def run() -> list[dict[str, Any]]:
    """One row per size."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary)
        committed = bases_folder(ROOT / "results")
        if committed.is_dir():
            bases_folder(results).symlink_to(committed)
        for model in ("s", "m"):
            done = subprocess.run(
                module_command("harness.devtools.bench.overhead", model, str(results)),
                capture_output=True,
                text=True,
                check=True,
                env=os.environ | code_path() | ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            )
            found = json.loads(done.stdout.strip().splitlines()[-1])
            rows.append(
                {
                    "what": f"size {model}, int4 rollouts",
                    "step [s]": found["step_s"],
                    "outside, share": found["share"],
                    "of it sync, share": found["sync"],
                    "of it scoring, share": found["reward"],
                    "peak memory [GiB]": found["memory_gib"],
                }
            )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
