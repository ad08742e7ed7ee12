"""Needs of a recipe that this machine, or verl, does not meet, in sentences. Nothing is loaded."""

from __future__ import annotations

import importlib.util

import torch

from harness.config.load import load, split_launch
from harness.foundation.clock import GIB
from harness.published.recipes.recipe import Recipe
from harness.run.checks import check
from harness.sweep.planning import with_default_precision
from harness.sweep.preview import STATE_BYTES


def of_machine(recipe: Recipe, asked: int | None = None) -> list[str]:
    """Needs that this machine does not meet: GPUs, their memory, vLLM. `asked`: so many GPUs of one machine in place of
    the recipe's."""
    scale, has = recipe.scale, torch.cuda.device_count()
    nodes, gpus = recipe.hardware if asked is None else (1, asked)
    lines: list[str] = []
    if has < gpus:
        each = f" in each of {nodes} nodes" if nodes > 1 else ""
        lines.append(f"{gpus} GPU{'s' * (gpus > 1)}{each} ({scale.gpu}): {has} are here")
    elif nodes > 1:
        lines.append(f"{nodes} nodes of {gpus} GPUs: this is one")
    if has:
        memory = torch.cuda.get_device_properties(0).total_memory / GIB
        if memory < 0.95 * scale.memory_gib:
            lines.append(f"{scale.memory_gib} GiB a GPU: {memory:.0f} are here")
    wanted = ("vllm", "verl") if gpus * nodes > 1 else ("vllm",)
    lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
    if lacking:
        lines.append(f"{' and '.join(lacking)} not installed: make setup EXTRAS=dev,gpu")
    return lines


def memory_gib(parameters_b: float) -> float:
    """GiB of masters, gradients and moments of a model of so many billion parameters, over all GPUs together."""
    return STATE_BYTES * parameters_b * 1e9 / GIB


def of_verl(recipe: Recipe) -> list[str]:
    """Arms that trainer=verl refuses, with its reason: these run under trainer=local alone."""
    reasons: dict[str, list[str]] = {}
    for label, arm in recipe.arms.items():
        words = split_launch(with_default_precision([*recipe.overrides(), *(f"{k}={v}" for k, v in arm.items())]))[0]
        try:
            check(load([*(word for word in words if not word.startswith("trainer=")), "trainer=verl", "model=s128"]))
        except ValueError as error:
            reasons.setdefault(str(error), []).append(label)
    every = len(recipe.arms)
    return [f"{'every arm' if len(found) == every else ', '.join(found)}: {why}" for why, found in reasons.items()]
