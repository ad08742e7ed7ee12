"""GPTQ of the largest model trained here, and what UAQ, AQN and new KV scales add to a GRPO step; one thread.

    python -m harness.devtools.bench preparations

GPTQ: size l at int4, 128 texts of 18 + 10 tokens. Bar: 30 s on two cores, met a fortiori on one.
Shares: of the default step at size s (method bf16, 32 x 8 rollouts), which no emulated format makes longer. Bar: all
three at most 5 % of it, where UAQ, which transforms once in a run, counts as if it did so at every step. Beside it, and
without a bar, the share of a step of fp8_rl with FP8 blocks and cache, the method whose scales these are.
Contestants take turns; shares are of process CPU time, wall seconds stand beside it. Left out: files that a
preparation reads and writes, responses that GPTQ's texts need, and what noise or scales cost the engine (nothing).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.api import Plan, Site, Step, weight_format
from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.config.resolve import resolve, rollout_plan
from harness.config.schema import Launch
from harness.devtools.bench.fp8_flow import FLOW, NEW, PROMPT
from harness.devtools.bench.sampler import decoder
from harness.devtools.bench.timing import cpu_seconds, in_turns
from harness.fitting.gptq_decoder import quantize_decoder
from harness.foundation.clock import Clock
from harness.foundation.provenance import ROOT
from harness.models.decoder import Decoder
from harness.records.paths import bases_folder
from harness.run.build import build
from harness.run.collect import collect
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.start.prepare import NUM_CALIBRATION
from methods.fp8_rl import RecalibratedKV
from methods.qerl import AQN
from methods.qurl import UAQ

STEPS = 15
"""Measured steps; two before them warm up."""
Seconds = tuple[float, float]
"""Wall and process CPU time."""


def wall_and_cpu(work: Callable[[], object]) -> Seconds:
    """Seconds of one call."""
    started = time.perf_counter()
    cpu = cpu_seconds(work)
    return time.perf_counter() - started, cpu


def gptq_seconds() -> Seconds:
    """GPTQ over every linear layer of a random decoder of size l, in the true-sequential order."""
    config = resolve(load(["model=l", "method=naive", "precision=int4"]))
    model = Decoder(decoder_config(config.model), torch.Generator().manual_seed(0), init_std=0.1)
    shape = (NUM_CALIBRATION, PROMPT + NEW)
    ids = torch.randint(2, 32, shape, generator=torch.Generator().manual_seed(1))
    fmt_of = partial(weight_format, rollout_plan(config.precision))
    return wall_and_cpu(lambda: quantize_decoder(model, ids, torch.ones(shape, dtype=torch.bool), fmt_of))


def uaq() -> Callable[[], object]:
    """UAQ's transform of a checkpoint of size s, already read."""
    model = decoder("s")
    site = Site(
        checkpoint=Path("checkpoint"), original=Path("checkpoint"), calibration=(), seed=0, fixed={},
        demonstrations=lambda count: [], sample=_no_sample, build=lambda folder: model,
        wrap=lambda found: found,
    )  # fmt: skip
    return lambda: UAQ().prepare(site, Plan())


def _no_sample(*given: object) -> Any:
    raise NotImplementedError("UAQ needs no responses")


def grpo(run: Run) -> Callable[[], None]:
    """A call that takes the next GRPO step of a run."""

    def step() -> None:
        grpo_step(run)
        run.step += 1

    return step


def additions(run: Run) -> dict[str, Callable[[], object]]:
    """Work that each part adds to a step, on rows that the run itself sampled."""
    grpo_step(run)
    aqn, kv, at = AQN(), RecalibratedKV(), Step(index=40, total=80, seed=0)
    seqs = collect(run, at, Clock("cpu")).seqs
    no_batch: Any = None  # the part reads token ids alone

    def noise(weights: list[tuple[str, torch.Tensor]]) -> None:
        for _ in aqn.sync(iter(weights), at, FLOW, {}, {}):
            pass

    def scales() -> None:
        found = kv.refit(run.trainer.model, seqs, no_batch, at, FLOW, {}, {})
        assert found is not None
        for _ in kv.sync(iter(()), at, FLOW, found, {}):
            pass

    return {
        "UAQ, once in a run": uaq(),
        "AQN, every push": partial(noise, list(run.trainer.weights())),
        f"KV scales of {kv.rows} rows, every step": scales,
    }


def small_run(folder: Path, *words: str) -> Run:
    """A run at size s, from the committed base where there is one."""
    committed, bases = bases_folder(ROOT / "results"), bases_folder(folder)
    if committed.is_dir() and not bases.exists():
        bases.symlink_to(committed)
    return build(resolve(load(["model=s", *words])), Launch(results=str(folder)))[0]


def run() -> list[dict[str, Any]]:
    """One row per piece of work."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plain, fp8 = (
            small_run(folder),
            small_run(folder, "method=fp8_rl", "precision=fp8_block+kv8"),
        )
        added = additions(plain)
        work = {"bf16": grpo(plain), "fp8_rl": grpo(fp8), **added}
        times = in_turns(work, wall_and_cpu, 2, STEPS)
    found = {what: tuple(map(median, zip(*values, strict=True))) for what, values in times.items()}
    found["all three"] = tuple(map(sum, zip(*(found[what] for what in added), strict=True)))
    rows: list[dict[str, Any]] = []
    for what, (wall, cpu) in [("GPTQ, size l, int4", gptq_seconds()), *found.items()]:
        is_part = what in added or what == "all three"
        rows.append({
            "what": f"step of {what}" if what in ("bf16", "fp8_rl") else what, "wall [s]": wall, "CPU [s]": cpu,
            "bar [s]": 30.0 if what.startswith("GPTQ") else None,
            "share of bf16's step": cpu / found["bf16"][1] if is_part else None,
            "bar, share": 0.05 if what == "all three" else None,
            "share of fp8_rl's step": cpu / found["fp8_rl"][1] if is_part else None,
        })  # fmt: skip
    return rows
