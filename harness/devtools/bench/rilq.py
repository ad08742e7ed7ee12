"""Cost of RILQ: the one fit before a run, a refit within it, and the staleness measured at every step; one thread.

    python -m harness.devtools.bench rilq

Size s, 320 sequences of 18 + 10 tokens, int2 weights, rank 16. Bar: the fit with its 1250 updates and 51 validations,
never stopped early, takes at most 120 s. A tenth of it is run and counted ten times. Process CPU time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.api import Plan, Rollout, Sequences, Site, Step, TokenBatch
from harness.devtools.bench.sampler import decoder
from harness.devtools.bench.timing import cpu_seconds
from harness.numerics.formats import format_named
from methods.rilq import RILQ
from methods.rilq_refresh import RILQRefresh

PROMPT, NEW, SHARE = 18, 10, 10
INT2 = Plan(rollout_weights=format_named("int2_g16_asym"))


def site(size: str) -> Site:
    """A task of random demonstrations alone."""
    ids = torch.randint(2, 32, (320, PROMPT + NEW), generator=torch.Generator().manual_seed(1)).tolist()
    pairs = [(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in ids]

    def sample(module: object, prompts: object, seed: int) -> Rollout:
        raise NotImplementedError("the demonstrations suffice")

    return Site(
        checkpoint=Path("checkpoint"), original=Path("checkpoint"), calibration=(), seed=0, fixed={}, sample=sample,
        demonstrations=lambda count: pairs[:count], build=lambda folder: decoder(size), wrap=lambda model: model,
    )  # fmt: skip


def run() -> list[dict[str, Any]]:
    """One row per piece of work."""
    part = RILQ(updates=1250 // SHARE, patience=1250, sampled_frac=0.0)
    plan, at = replace(INT2, adapters=part.plan(INT2).adapters), site("s")
    start, cloq = (replace(part, start=start) for start in ("none", "cloq"))
    before = cpu_seconds(lambda: start.prepare(at, plan))
    rows: list[dict[str, Any]] = [
        {"what": "CLoQ start", "CPU [s]": cpu_seconds(lambda: cloq.prepare(at, plan)), "bar [s]": None},
        {"what": "fit", "CPU [s]": SHARE * (cpu_seconds(lambda: part.prepare(at, plan)) - before), "bar [s]": 120.0},
    ]
    model, fixed = decoder("s"), start.prepare(at, plan)[1]
    ids = torch.tensor([[*prompt, *response] for prompt, response in at.demonstrations(256)])
    sampled = torch.ones(256, NEW, dtype=torch.bool)
    seqs = Sequences(ids=ids, prompt_lens=PROMPT, token_ids=ids[:, PROMPT:], sampled=sampled)
    step, logp = Step(index=1, total=9, seed=0), torch.zeros(256, NEW)
    batch = TokenBatch(token_ids=seqs.token_ids, mask=sampled, adv=logp, rollout_logp=logp, old_logp=logp, step=step)
    for what, every in (("refit of 200 updates", 1), ("staleness of one step", None)):
        refresh = RILQRefresh(refresh_every=every, triggers=False, patience=99)
        found = cpu_seconds(lambda refresh=refresh: refresh.refit(model, seqs, batch, step, plan, fixed, {}))
        rows.append({"what": what, "CPU [s]": found, "bar [s]": None})
    return rows
