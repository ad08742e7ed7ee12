"""Our side of `peers.py`: the whole step of the harness on vLLM, timed stage by stage.

    python -m harness.devtools.bench.peer_ours MODEL_FOLDER SETTINGS ENGINE

Settings are those of `trl_step.py`; the last line is {"steps": ..., "stages": ..., "packages": ...} as JSON. Left out:
evaluation, which no peer does either.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.api import Plan
from harness.config.compose import compose
from harness.config.load import load
from harness.config.resolve import resolve
from harness.devtools.bench.timing import timed
from harness.devtools.bench.trl_step import Settings
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.factory import make_engine
from harness.foundation.clock import STAGES
from harness.foundation.provenance import packages
from harness.models.checkpoint import load_decoder
from harness.numerics.formats import format_named
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.tasks.count import Count
from harness.trainers.local.forward import Thrift
from harness.trainers.local.trainer import LocalTrainer


def run_of(folder: Path, given: Settings, engine: str) -> Run:
    """A run of method bf16 on `folder`, one update per batch, at step 0."""
    words = [
        f"algo.num_prompts={given.prompts}", f"algo.group_size={given.group}", f"trainer.lr={given.lr}",
        f"engine={engine}", f"engine.max_batch={given.prompts * given.group}", f"trainer.device={given.device}",
        f"engine.gpu_memory={given.gpu_memory}", f"trainer.steps={given.steps}",
    ]  # fmt: skip
    config = resolve(load(words))
    composed, model = compose(config), load_decoder(folder).to(given.device)
    task = Count(prompt_tokens=given.prompt_tokens, max_new_tokens=given.tokens)
    length, is_cuda = given.prompt_tokens + given.tokens, given.device == "cuda"
    compute = format_named("bf16") if is_cuda else None  # as the peers do: float32 on a CPU, BF16 products on a GPU
    trainer = LocalTrainer(
        model, config.trainer, replace(composed.plan, train_compute=compute), temperature=1.0, micro_batch_rows=None,
        micro_batch_tokens=given.rows * length, num_updates=1000,
        thrift=Thrift(
            native_16bit=is_cuda, attention_16bit=is_cuda, compile=given.is_compiled,
            checkpoint_layers=given.is_checkpointed,
        ),
    )  # fmt: skip
    ids: dict[str, Any] = {"eos_id": task.eos_id, "pad_id": task.pad_id, "device": given.device}
    made = make_engine(config, model.config, composed.plan, trainer_model=None, keeps_log_probs=False, **ids)
    return Run(
        config=config, composed=composed, task=task, trainer=trainer, engine=made,
        reference=EmbeddedEngine(model.config, Plan(), **ids), folder=folder,
        max_new_tokens=given.tokens, eval_items=[],
    )  # fmt: skip


def measure(folder: Path, given: Settings, engine: str) -> dict[str, Any]:
    """Seconds of every step after the warm-up, in all and by stage."""
    run = run_of(folder, given, engine)
    steps, rows = list[float](), list[dict[str, Any]]()
    try:
        for _ in range(given.steps):
            took, row = timed(lambda: grpo_step(run), given.device)
            steps.append(took)
            rows.append(row)
            run.step += 1
    finally:
        run.close()
    rows = rows[given.warm_up :]
    stages = {stage: [row[f"time/{stage}_s"] for row in rows] for stage in STAGES if stage != "eval"}
    return {"steps": steps[given.warm_up :], "stages": stages, "packages": packages()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(Path(sys.argv[1]), Settings(**json.loads(sys.argv[2])), sys.argv[3])))
