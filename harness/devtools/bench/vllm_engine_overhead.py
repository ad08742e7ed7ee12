"""Tokens/s of `VLLMEngine.generate` against bare `LLM.generate` on the same live engine, in turns.

Every call gets prompts of its own, so that no side finds the other's prefixes. Bare is what a user would write: one
`SamplingParams`, prompts as token ids, no progress bar, outputs left as vLLM gives them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from harness.devtools.bench.vllm_engine_push import new_engine, trainer_tensors
from harness.engines.vllm.engine import VLLMEngine
from harness.foundation.seeds import stable_seed
from harness.studies.throughput.shapes import shape_of

PROMPT = 64
OURS, BARE, FLAT = "engine", "bare", "bare, flat_logprobs"
TARGET = 0.98
"""Share of bare vLLM's rate that ours shall reach at least."""
Prompts = list[list[int]]


def ours(engine: VLLMEngine, new: int, prompts: Prompts) -> int:
    """One call of the engine; tokens made."""
    rollout = engine.generate(prompts, num_samples=1, max_new_tokens=new, temperature=1.0, seed=0)
    return int(rollout.lengths.sum())


def bare(engine: VLLMEngine, is_flat: bool, new: int, prompts: Prompts) -> int:
    """One call of vLLM; tokens made."""
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    sampling = SamplingParams(
        temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=is_flat
    )
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def prompts_of(batch: int, vocab: int, call: int) -> Prompts:
    """Random prompts of call number `call`."""
    g = torch.Generator().manual_seed(stable_seed(0, "overhead", batch, call))
    return torch.randint(3, vocab, (batch, PROMPT), generator=g).tolist()


def ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Tokens/s of every call, by side -> the median of ours over that of each other side."""
    own = median(rates[OURS])
    return {side: own / median(values) for side, values in rates.items() if side != OURS}


def measure_cell(
    sides: Mapping[str, Callable[[int, Prompts], int]], batch: int, new: int, repeats: int, vocab: int
) -> dict[str, Any]:
    """Every side `repeats` times, in an order that rotates, after one short call each."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    names, call = list(sides), 0
    for name in names:
        sides[name](min(new, 16), prompts_of(batch, vocab, call := call + 1))
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prompts = prompts_of(batch, vocab, call := call + 1)
            started = time.perf_counter()
            tokens = sides[name](new, prompts)
            rates[name].append(tokens / (time.perf_counter() - started))
            assert tokens == batch * new, f"{name}: {tokens} tokens of {batch} x {new}"
    return {"batch": batch, "new_tokens": new, "tokens_per_s": rates,
            "median_tokens_per_s": {name: median(values) for name, values in rates.items()},
            "ratio": ratios(rates)}  # fmt: skip


def measure(
    size: str,
    precision: str,
    device: str,
    cells: Sequence[tuple[int, int]],
    repeats: int,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """One engine, all cells. `save`: is given what there is after every cell. Raises ValueError as `VLLMEngine`."""
    config = shape_of(size)
    longest = PROMPT + max(new for _, new in cells)
    engine = new_engine(
        size, precision, device, max_batch=max(batch for batch, _ in cells), max_length=longest, gpu_memory=0.7
    )
    engine.load_weights(iter(trainer_tensors(config, device).items()))
    sides = {OURS: partial(ours, engine), BARE: partial(bare, engine, False), FLAT: partial(bare, engine, True)}
    found: dict[str, Any] = {"precision": precision, "cells": []}
    for batch, new in cells:
        found["cells"].append(measure_cell(sides, batch, new, repeats, config.vocab_size))
        save(found)
    engine.close()
    return found
