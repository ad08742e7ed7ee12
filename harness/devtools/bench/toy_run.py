"""A run on a given checkpoint and a task of random prompts of fixed length, for timing the loop alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.api import Plan
from harness.config.compose import compose
from harness.config.load import load
from harness.config.resolve import resolve
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.checkpoint import load_decoder
from harness.run.run import Run
from harness.tasks import token_ids
from harness.tasks.count import Count
from harness.trainers.local.trainer import LocalTrainer


def toy_run(folder: Path, *, num_prompts: int, group_size: int, tokens: int, prompt_tokens: int) -> Run:
    """A run of method bf16 in float32 on `folder`, without evaluation."""
    words = [f"algo.num_prompts={num_prompts}", f"algo.group_size={group_size}", "precision=fp32", "trainer.lr=1e-6"]
    config = resolve(load(words))
    task = Count(prompt_tokens=prompt_tokens, max_new_tokens=tokens)
    model = load_decoder(folder)
    composed = compose(config)
    trainer = LocalTrainer(
        model, config.trainer, composed.plan, temperature=1.0, micro_batch_rows=None, micro_batch_tokens=32768,
        num_updates=1000,
    )  # fmt: skip
    engine = EmbeddedEngine(model.config, composed.plan, **token_ids(task))
    return Run(
        config=replace(config), composed=composed, task=task, trainer=trainer, engine=engine,
        reference=EmbeddedEngine(model.config, Plan(), **token_ids(task)),
        folder=folder, max_new_tokens=tokens, eval_items=[],
    )  # fmt: skip
