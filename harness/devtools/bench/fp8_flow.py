"""A Jet-RL training step against the plain one, and what renewing the KV scales costs: ratios, one thread.

    python -m harness.devtools.bench fp8_flow

Score, backward and AdamW of 256 rows of 18 + 10 tokens. "plain" is the float32 step of
method bf16, "bf16" the same with every matmul rounded. Bar: the FP8 flow takes at most 4 x the plain step. Contestants
take turns inside one run, on process CPU time. Generation is left out of both sides: it is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from harness.api import Plan, Sequences, Step
from harness.config.schema import TrainerConfig
from harness.devtools.bench.sampler import decoder
from harness.devtools.bench.timing import cpu_seconds, in_turns
from harness.numerics.formats import format_named
from harness.trainers.local.trainer import LocalTrainer, Scores
from methods.fp8_rl import RecalibratedKV
from methods.jet_rl import FP8Flow

ROWS, PROMPT, NEW = 256, 18, 10
STEPS = 12
"""Measured steps of each; two before them warm up."""
BAR = 4.0
"""Plain steps that the FP8 flow may take."""
FLOW = Plan(rollout_weights=format_named("e4m3_block"), rollout_acts=format_named("e4m3_1x128"),
            rollout_kv=format_named("e4m3_kv"))  # fmt: skip


def batch() -> Sequences:
    """Random rows that all end at the last token."""
    ids = torch.randint(2, 32, (ROWS, PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    sampled = torch.ones(ROWS, NEW, dtype=torch.bool)
    return Sequences(ids=ids, prompt_lens=PROMPT, token_ids=ids[:, PROMPT:].contiguous(), sampled=sampled)


def trainer(size: str, what: str) -> LocalTrainer:
    """A trainer of one of the contestants."""
    model, plan = decoder(size), Plan()
    if what == "bf16":
        plan = Plan(train_compute=format_named("bf16"))
    elif what.startswith("fp8"):
        FP8Flow(fp8_saved_activations="saved" in what).wrap(model, FLOW, {})
        plan = FP8Flow().plan(FLOW)
    return LocalTrainer(model, TrainerConfig(lr=1e-6), plan, temperature=1.0, micro_batch_rows=None,
                        micro_batch_tokens=32768, num_updates=1000)  # fmt: skip


def step(t: LocalTrainer, seqs: Sequences) -> None:
    """One update; one forward pass serves the old log-probs and the loss, as in the loop."""

    def loss_of(rows: torch.Tensor, found: Scores) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -found.logp.mean(), {}

    t.accumulate(seqs, loss_of, t.score(seqs, keep_graph=True))
    t.step()


def run() -> list[dict[str, Any]]:
    """One row per size and contestant."""
    rows: list[dict[str, Any]] = []
    seqs, at, part = batch(), Step(index=0, total=1, seed=0), RecalibratedKV()
    no_batch: Any = None  # the part reads token ids alone
    for size in ("s", "m"):
        own = {what: trainer(size, what) for what in ("plain", "bf16", "fp8, saved in fp8", "fp8, kept in bf16")}
        work: dict[str, Callable[[], object]] = {what: partial(step, t, seqs) for what, t in own.items()}
        work[f"KV scales of {part.rows} rows"] = partial(
            part.refit, own["plain"].model, seqs, no_batch, at, FLOW, {}, {}
        )
        times = in_turns(work, cpu_seconds, 2, STEPS)
        plain = median(times["plain"])
        for what, values in times.items():
            found = median(values)
            bar = BAR if what.startswith("fp8") else None
            rows.append({"size": size, "what": what, "CPU [s]": found, "x plain step": found / plain, "bar": bar})
    return rows
