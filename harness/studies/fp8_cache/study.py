"""The rules of one policy measured: the same answers through every cache, and answers sampled through some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.foundation.seeds import stable_seed
from harness.models.decoder import Decoder
from harness.numerics.kv_scales import KV, Role
from harness.records.sample_scores import over_questions
from harness.studies.fp8_cache.answers import (
    Answers,
    divergence,
    exact_engine,
    log_probs,
    mean_k3,
    prompts_of,
    sampled,
)
from harness.studies.fp8_cache.attention import FORMAT, Cache, through
from harness.studies.fp8_cache.magnitudes import Magnitudes, magnitudes
from harness.studies.fp8_cache.scales import Amaxes, Arm, arms, dummy_decoder, fresh_decoder, scanned
from harness.tasks import Item, Task

CALIBRATION = 32
"""Questions that scales are calibrated on; none of them is measured."""
FIRST = 4
"""Prompts of an engine's first forward pass."""
TOP = 0.01
"""Share of the tokens, those with the largest k3, whose part of the sum a row names."""
SCANNED = 8
"""Answers that a scan of factors takes."""
SAMPLED = ("1", "vllm", "nemo", "vllm, stale", "nemo, stale", "vllm, fresh", "vllm, fresh wide")
"""Rules whose accuracy is measured where it is asked for."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One policy."""

    rows: list[dict[str, Any]]
    seen: Magnitudes
    caches: dict[str, Cache]
    num_tokens: int
    """Tokens of the answers."""


def largest_of(model: Decoder, task: Task) -> tuple[Amaxes, Amaxes]:
    """Largest magnitudes of a policy over the first prompts, and over calibration prompts with its own answers."""
    prompts = [item.prompt for item in task.sample("train", range(CALIBRATION))]
    answers = sampled(exact_engine(model, task), task, prompts, seed=stable_seed(0, "calibration"))
    return prompts_alone(model, task), magnitudes(model, answers).all()


def prompts_alone(model: Decoder, task: Task) -> Amaxes:
    """Largest magnitudes over the prompts of an engine's first forward pass."""
    prompts = [item.prompt for item in task.sample("train", range(FIRST))]
    width = max(map(len, prompts))
    given = Answers(
        ids=torch.tensor([[*prompt, *[0] * (width + 1 - len(prompt))] for prompt in prompts]),
        prompt_lens=torch.tensor([len(prompt) for prompt in prompts]),
        lens=torch.ones(len(prompts), dtype=torch.int64),
    )
    return magnitudes(model, given).prompts


def compare(
    model: Decoder, task: Task, *, first: Decoder | None, num_answers: int, is_scanned: bool, tell: Tell
) -> Compared:
    """Every rule on one policy. `first`: the weights that were loaded first, for scales that are kept.

    The answers are those of the exact policy to `num_answers` held-out questions, one each; a scan takes the first
    SCANNED of them.
    """
    config = model.config
    prompts, everything = largest_of(model, task)
    untrained = {
        "dummy": prompts_alone(dummy_decoder(config), task),
        "fresh": prompts_alone(fresh_decoder(config, is_wide=False), task),
        "fresh wide": prompts_alone(fresh_decoder(config, is_wide=True), task),
    }
    first_prompts, first_all = (None, None) if first is None else largest_of(first, task)
    given = prompts_of(task, num_answers)
    answers = sampled(exact_engine(model, task), task, given, seed=stable_seed(0, "fp8 cache"))
    seen = magnitudes(model, answers)
    chosen = arms(config, prompts, everything, untrained, first_prompts, first_all)
    exact = log_probs(model, answers)
    rows: list[dict[str, Any]] = []
    for arm in chosen:
        rows.append(row_of(arm, model, answers, exact))
        tell(f"{arm.name}: k3 {rows[-1]['k3']:.2g}")
    if is_scanned:
        few = answers.first(SCANNED)
        exact = exact[: int(few.lens.sum())]
        parts: tuple[tuple[Role, ...], ...] = (KV, ("k",), ("v",))
        for arm in (arm for roles in parts for arm in scanned(seen.all(), roles)):
            rows.append(row_of(arm, model, few, exact))
            tell(f"{arm.name}: k3 {rows[-1]['k3']:.2g}")
    return Compared(
        rows=rows, seen=seen, caches={arm.name: arm.cache for arm in chosen}, num_tokens=len(answers.tokens())
    )


def row_of(arm: Arm, model: Decoder, answers: Answers, exact: Tensor) -> dict[str, Any]:
    """One rule: the answers scored through its cache against their `exact` log-probs [N, V]."""
    with through(model, arm.cache) as counts:
        found = log_probs(model, answers, counts)
    k3 = divergence(found, exact)
    tokens = answers.tokens()[:, None]
    gap = (found.gather(1, tokens) - exact.gather(1, tokens)).abs()[:, 0]
    top = k3.topk(max(1, round(TOP * len(k3)))).values
    return {
        "name": arm.name, "words": arm.words, "factor": arm.factor, **mean_k3(k3, answers),
        "k3_top_share": float(top.sum() / k3.sum()) if float(k3.sum()) > 0 else 0.0,
        "logp_absdiff_mean": float(gap.mean()), "stored": counts.shares(),
    }  # fmt: skip


def answered(
    model: Decoder, task: Task, items: Sequence[Item], each: int, cache: Cache | None
) -> dict[str, float | None]:
    """Accuracy of `each` answers to every item, sampled through a cache (None: an exact one) with the same random
    numbers, with its 95 % interval, and their mean length in tokens. Raises ValueError for a cache that the engine does
    not have."""
    engine = exact_engine(model, task, None if cache is None else FORMAT)
    if cache is not None:
        if set(cache.scales) != set(KV) or any(x.shape[1] != 1 for x in cache.scales.values()):
            raise ValueError("the engine rounds keys and values, under one scale a layer each")
        engine.kv.scales = torch.cat([cache.scales[role] for role in KV], 1)
    out = engine.generate(
        [item.prompt for item in items], num_samples=each, max_new_tokens=task.max_new_tokens, temperature=1.0,
        seed=stable_seed(0, "fp8 cache accuracy"),
    )  # fmt: skip
    scores = task.score([item for item in items for _ in range(each)], out.responses())
    right = over_questions(np.array([score.reward for score in scores]).reshape(-1, each).mean(1))
    return {"accuracy": right.mean, "accuracy_low": right.low, "accuracy_high": right.high,
            "length_mean": float(out.lengths.double().mean())}  # fmt: skip


def accuracies(
    found: Compared, model: Decoder, task: Task, *, num_prompts: int, each: int, tell: Tell
) -> dict[str, dict[str, float | None]]:
    """Rule -> `answered` through its cache, for the rules SAMPLED, and "exact" through none."""
    items = task.sample("eval", range(num_prompts))
    told: dict[str, dict[str, float | None]] = {}
    for name, cache in {"exact": None, **{n: found.caches[n] for n in SAMPLED if n in found.caches}}.items():
        told[name] = answered(model, task, items, each, cache)
        tell(f"{name}: accuracy {told[name]['accuracy']:.3f}")
    return told
