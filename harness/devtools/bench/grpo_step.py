"""One GRPO step against TRL's GRPOTrainer and against the bare forward + backward + AdamW, one thread each.

Same Hugging Face folder (Qwen2 style, 2 layers, hidden 128), 8 prompts x 8 completions x 64 tokens, float32, one
update per batch, no KL, the same allocator settings. The programs run one after the other in processes of their own.
TRL needs its own environment (`make oracles NAME=trl` makes it); without it the comparison is reported as missing, not
as a number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.api import Plan
from harness.config.compose import compose
from harness.config.load import load
from harness.config.resolve import resolve
from harness.devtools.bench.timing import seconds
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.own_process import module_command
from harness.foundation.provenance import ROOT
from harness.foundation.seeds import generator
from harness.models.checkpoint import load_decoder, save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import save_tokenizer
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.sweep.launchers.local import ENVIRONMENT
from harness.tasks import token_ids
from harness.tasks.count import Count
from harness.trainers.local.trainer import LocalTrainer

TRL_PYTHON = ROOT / ".venv-oracle-trl" / "bin" / "python"
PROMPTS, GROUP, TOKENS, PROMPT_TOKENS = 8, 8, 64, 8
STEPS = 8
"""Measured steps per process; the first two after start-up are left out."""


def make_model(folder: Path) -> None:
    """The random model both programs train."""
    config = DecoderConfig(
        vocab_size=128, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=384, qk_norm=False, attention_bias=True, max_positions=256, eos_id=1, pad_id=0, bos_id=2,
    )  # fmt: skip
    save_decoder(Decoder(config, generator=generator("cpu", 0, "bench")), folder)
    save_tokenizer(folder, 128)


def ours(folder: Path) -> list[float]:
    """Seconds of each step of our loop: sync, generate, score, update and metrics."""
    run = random_prompts(folder)
    return [seconds(lambda: grpo_step(run)) for _ in range(STEPS + 2)][2:]


def random_prompts(folder: Path) -> Run:
    """A run of method bf16 in float32 on random prompts of fixed length, without evaluation."""
    words = [f"algo.num_prompts={PROMPTS}", f"algo.group_size={GROUP}", "precision=fp32", "trainer.lr=1e-6"]
    config = resolve(load(words))
    task = Count(prompt_tokens=PROMPT_TOKENS, max_new_tokens=TOKENS)
    model, composed = load_decoder(folder), compose(config)
    trainer = LocalTrainer(
        model, config.trainer, composed.plan, temperature=1.0, micro_batch_rows=None, micro_batch_tokens=32768,
        num_updates=1000,
    )  # fmt: skip
    return Run(
        config=config, composed=composed, task=task, trainer=trainer,
        engine=EmbeddedEngine(model.config, composed.plan, **token_ids(task)),
        reference=EmbeddedEngine(model.config, Plan(), **token_ids(task)),
        folder=folder, max_new_tokens=TOKENS, eval_items=[],
    )  # fmt: skip


def floor(folder: Path) -> list[float]:
    """Seconds of one bare forward + backward + AdamW over the same number of tokens."""
    model = load_decoder(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(3, 128, (PROMPTS * GROUP, PROMPT_TOKENS + TOKENS), generator=generator("cpu", 1, "bench"))

    def step() -> None:
        logits = model(ids[:, :-1])[:, PROMPT_TOKENS - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT_TOKENS:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [seconds(step) for _ in range(STEPS + 2)][2:]


def _process(command: list[str], folder: Path) -> list[float]:
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """Rows of (what, seconds per step, ratio to ours); medians over `rounds` interleaved processes."""
    times: dict[str, list[float]] = {"ours": [], "floor": [], "TRL": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_model(folder)
        for _ in range(rounds):
            times["ours"] += _process(module_command("harness.devtools.bench.grpo_step", "ours"), folder)
            times["floor"] += _process(module_command("harness.devtools.bench.grpo_step", "floor"), folder)
            if TRL_PYTHON.exists():
                times["TRL"] += _process([str(TRL_PYTHON), str(ROOT / "harness/devtools/bench/trl_step.py")], folder)
    rows: list[dict[str, Any]] = []
    for name, values in times.items():
        found = median(values) if values else None
        rows.append(
            {
                "what": f"GRPO step, 64 x 64 tokens, 1 thread: {name}",
                "value": found,
                "unit": "s",
                "ratio": found / median(times["ours"]) if found else None,
                "note": "" if found else "not measured: `make oracles NAME=trl` makes its environment",
            }
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"ours": ours, "floor": floor}[sys.argv[1]](Path(sys.argv[2]))))
