"""A sweep whose cells take no time: a runner that makes records with evaluations from a formula."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.config.load import run_id
from harness.config.schema import RunConfig
from harness.foundation.seeds import stable_seed
from harness.records.paths import runs_folder
from harness.records.run_result import EvalRecord, RunResult, write_result
from harness.records.sweep_file import Until
from harness.sweep import Sweep
from harness.sweep.launchers.job import Admit, Event
from tests.sweep.stand_in import result_of
from tests.sweep.tiny import TINY

START = 0.4
EFFECTS = {"int8": (0.0, 0.004), "int4": (-0.2, 0.004), "nvfp4": (-0.045, 0.025), "int2": (0.0, 0.15), "nf4": None}
"""Rollout format -> (difference to BF16, its standard deviation over any three seeds); None never moves."""


def toy_sweep(**changes: Any) -> Sweep:
    """Five uncorrected formats against BF16, three seeds of their own."""
    until = Until(max_seeds=changes.pop("max_seeds", 9), **changes)
    arms = ({"method": "bf16"}, {"method": "naive", "precision": list(EFFECTS)})
    return Sweep(name="test", question="", overrides=TINY, arms=arms, seeds=(0, 1, 2), until=until)


def accuracy(config: RunConfig) -> float:
    """Accuracy at the end: the base's own level, the format's effect, and -1, 0 or 1 spreads of it by the seed."""
    level = 0.6 + np.random.default_rng(stable_seed(config.seed, "level")).normal(0, 0.03)
    effect = EFFECTS.get(config.precision.name, (0.0, 0.0))
    return START if effect is None else float(level + effect[0] + effect[1] * (config.seed % 3 - 1))


@dataclass(kw_only=True)
class ToyRunner:
    """A launcher that runs its jobs one after another; `ran` is what it ran."""

    accuracy: Callable[[RunConfig], float] = accuracy
    ending: Callable[[RunConfig], tuple[str, str | None]] = lambda config: ("ok", None)
    stop_after: int = 10**6
    """Raise KeyboardInterrupt instead of running more cells than this."""
    ran: list[RunConfig] = field(default_factory=list[RunConfig])

    def __call__(self, jobs: Sequence[Any], *, admit: Admit) -> Generator[Event, None, None]:
        for job in filter(admit, jobs):
            if len(self.ran) >= self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(job.config)
            yield Event(kind="started", config=job.config, pid=1)
            result = self.result(job)
            rows = [{"train/loss": 0.0}] if result.status == "ok" else None
            write_result(runs_folder(job.launch.results, job.launch.sweep), result, rows)
            yield Event(kind="finished", config=job.config, result=result)

    def result(self, job: Any) -> RunResult:
        """The record of a cell, with evaluations at its start and its end."""
        end = self.accuracy(job.config)
        evals = [
            EvalRecord(step=step, precision="fp32", site=site, accuracy=value, question_hash="q")
            for step, value in ((0, START), (job.config.trainer.steps, end))
            for site in ("reference", "rollout")
        ]
        return result_of(job, self.ending(job.config)).model_copy(update={"evals": evals})

    def names(self) -> list[tuple[str, int]]:
        """(format, seed) of what ran, in order."""
        assert len({run_id(config) for config in self.ran}) == len(self.ran), "a cell ran twice"
        return [(config.precision.name, config.seed) for config in self.ran]
