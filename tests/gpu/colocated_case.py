"""`python -m tests.gpu.colocated_case FOLDER WORD ...`: one small cell on vLLM, in a process of its own.

vLLM's allocator serves one engine that can sleep per process. The last line is JSON: status, error, the memory of the
record, seconds of the stage "sleep" and of all, kl_k3 and reward by step, and per evaluation its site and accuracy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.config.load import run_id
from harness.engines.vllm import engine as engines
from harness.records.run_result import read_series
from harness.run.cell import run_cell
from tests.toy import small_config, small_launch

WORDS = (
    "model=xs128", "engine=vllm", "trainer.device=cuda", "engine.gpu_memory=0.06", "trainer.steps=3",
    "trainer.eval_every=2", "task.num_eval=16", "base.target_accuracy=0.0", "base.num_eval=16",
)  # fmt: skip


def main(folder: Path, *words: str) -> None:
    """Print the line."""
    engines.small_cache = lambda *_: {"kv_cache_memory_bytes": 4 * 2**30}  # these runs need but a few MiB
    config = small_config(*WORDS, *words)
    result = run_cell(config, small_launch(folder))
    done = {
        "status": result.status, "error": result.error, "memory": result.memory_gib, "sleep_s": result.time_s["sleep"],
        "total_s": result.time_s["total"], "evals": [(e.step, e.site, e.accuracy) for e in result.evals],
        "trainer": result.trainer,
    }  # fmt: skip
    series = read_series(folder / "runs" / "test", run_id(config)) if result.num_steps else {}
    columns = {"kl": "mismatch/kl_k3", "reward": "reward/accuracy", "update": "memory/update_gib"}
    print(json.dumps(done | {name: series.get(column) for name, column in columns.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
