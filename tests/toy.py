"""Small real runs for tests: size xs, task chain, the committed base, a results folder of their own."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from harness.api import Site
from harness.config.load import load
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.foundation.provenance import ROOT
from harness.run.build import build
from harness.run.loop import grpo_step
from harness.run.run import Run
from harness.sweep import with_default_precision
from harness.tasks import Task

SMALL = (
    "model=xs", "task=chain", "model.spread=0", "trainer.steps=4", "trainer.eval_every=2", "task.num_eval=32",
    "algo.num_prompts=4", "algo.group_size=4",
)  # fmt: skip

MIXTURE = (
    "model=moe_xs", "task=sort", "task.n=3", "algo.num_prompts=16", "algo.group_size=8", "base.target_accuracy=0.3",
)  # fmt: skip
"""Overrides that make a small run one of a mixture of experts."""


def small_config(*overrides: str) -> RunConfig:
    """A resolved config of a run of seconds."""
    return resolve(load([*SMALL, *with_default_precision(overrides)]))


def small_launch(folder: Path, **values: object) -> Launch:
    """A launch into `folder`, with the committed bases at hand."""
    target = folder / "bases"
    if not target.exists():
        target.mkdir(parents=True)
        for base in (ROOT / "results" / "bases").glob("xs-chain8-b[01]-*"):
            shutil.copytree(base, target / base.name)
    return Launch(results=str(folder), sweep="test", **values)  # type: ignore[arg-type]


def site_of(model: nn.Module, **values: object) -> Site:
    """A site of one module for `Part.prepare`: every checkpoint builds a copy of it, earlier parts change nothing."""
    offered: dict[str, object] = {
        "checkpoint": Path("checkpoint"), "original": Path("original"), "calibration": (), "seed": 0, "fixed": {},
        "demonstrations": lambda count: [], "build": lambda folder: copy.deepcopy(model), "wrap": lambda found: found,
        "sample": None,
    }  # fmt: skip
    return Site(**(offered | values))  # type: ignore[arg-type]


def small_run(folder: Path, overrides: Sequence[str] = (), **values: object) -> Run:
    """A run at step 0."""
    return build(small_config(*overrides), small_launch(folder, **values))[0]


def take_steps(run: Run, count: int = 1) -> list[dict[str, Any]]:
    """The rows of so many steps of a run."""
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        rows.append(grpo_step(run))
        run.step += 1
    return rows


def stepped(folder: Path, *overrides: str, steps: int = 2, **launch: object) -> tuple[Run, list[dict[str, Any]]]:
    """A run after its first steps, and their rows."""
    run = small_run(folder, overrides, **launch)
    return run, take_steps(run, steps)


class Short:
    """A task that ends every response after two tokens."""

    def __init__(self, task: Task) -> None:
        self.task, self.pad_id = task, task.pad_id

    def num_kept(self, response: list[int]) -> int:
        return min(2, len(response))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)
