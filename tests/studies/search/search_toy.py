"""A search whose cells take no time: a runner that makes records from a formula, and a small space for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.load import parse, run_id
from harness.config.schema import RunConfig
from harness.foundation.seeds import stable_seed
from harness.records.run_result import write_result
from harness.run.cell import record, record_path, work_folder
from harness.studies.search.spec import Search
from harness.sweep.launchers.job import Event, Job
from tests.toy import SMALL

Scores = Callable[[RunConfig], dict[str, float]]
SPACE: dict[str, Any] = {
    "correction": {
        "choices": {
            "tis": ["method=flashrl", "knobs.TIS.cap={cap}"],
            "ppo": ["method=naive", "algo.mode=bypass_ppo"],
        }
    },
    "algo.eps_low": {"low": 0.05, "high": 0.8, "log": True},
    "algo.eps_high": {"low": 0.05, "high": 0.8, "log": True},
    "cap": {"low": 1.0, "high": 8.0, "log": True, "when": {"correction": ["tis"]}},
}


def toy_search(**changes: Any) -> Search:
    """A search over clip bounds, and a cap where there is a weight; `changes` replace keys of the file."""
    values: dict[str, Any] = {
        "name": "search_toy", "question": "Does it work?", "overrides": [*SMALL, "precision=int4"], "space": SPACE,
        "seeds": [0, 1, 2], "budget": {"trials": 12}, "sampler": {"startup": 5},
        "objectives": [
            {"metric": "auc", "direction": "maximize"},
            {"metric": "k3_median", "direction": "minimize", "log": True},
        ],
        "constraint": {"metric": "k3_median", "at_most": 0.5},
        "baselines": {
            "tis default": {"correction": "tis", "algo.eps_low": 0.2, "algo.eps_high": 0.28, "cap": 2.0},
            "ppo default": {"correction": "ppo", "algo.eps_low": 0.2, "algo.eps_high": 0.28},
        },
    }  # fmt: skip
    return parse(Search, values | changes)


def smooth_scores(config: RunConfig) -> dict[str, float]:
    """Best at eps_low 0.4, worse with distance in decades; a bypass loses 0.1; the seed's own level and noise added."""
    rng = np.random.default_rng(stable_seed(config.seed, "noise", run_id(config)))
    level = np.random.default_rng(stable_seed(config.seed, "level")).normal(0, 0.05)
    auc = 0.6 - 0.2 * abs(np.log10(config.algo.eps_low / 0.4)) - 0.1 * (config.algo.mode == "bypass_ppo")
    k3 = 0.1 * (config.algo.eps_high / 0.28) * np.exp(rng.normal(0, 0.05))
    return {"auc": float(auc + level + rng.normal(0, 0.01)), "k3_median": float(k3)}


class FakeRunner:
    """Owns the list of what it ran; cells end at once, or after `delay_s` with a step of progress on the way."""

    def __init__(self, scores: Scores = smooth_scores, delay_s: float = 0.0, rewards: Any = None) -> None:
        self.scores, self.delay_s, self.rewards = scores, delay_s, rewards
        self.ran: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, job: Job) -> Generator[Event, None, None]:
        with self.lock:
            self.ran.append(run_id(job.config))
        yield Event(kind="started", config=job.config, pid=0)
        for step in range(1, job.config.trainer.steps + 1 if self.rewards is not None else 1):
            work = work_folder(job.launch, run_id(job.config))
            work.mkdir(parents=True, exist_ok=True)
            shown = {"step": step, "reward": self.rewards(job.config, step)}
            (work / "progress.json").write_text(json.dumps(shown), encoding="utf-8")
            yield Event(kind="progress", config=job.config, step=step)
        time.sleep(self.delay_s)
        yield Event(kind="finished", config=job.config, result=self.write(job))

    def write(self, job: Job) -> Any:
        """The record of a cell; a score named "status" sets its status."""
        found = dict(self.scores(job.config))
        status = str(found.pop("status", "ok"))
        reason = None if status == "ok" else f"{status} at step 3"
        result = record(job.config, job.launch, None, {}, status, reason, None)
        result = result.model_copy(update={"summary": found, "time_s": {"total": 10.0}})
        rewards = [self.rewards(job.config, step) if self.rewards is not None else 0.5 for step in range(1, 5)]
        write_result(
            record_path(job.launch, run_id(job.config)).parent, result, [{"reward/accuracy": r} for r in rewards]
        )
        return result


def finished_cells(results: Path) -> list[str]:
    """Run ids of the records."""
    return sorted(path.stem for path in (results / "runs" / "search_toy").glob("*.json"))
