"""Cost of a policy step of a run: seconds per stage, with the size of the model and the length of a response."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.foundation.time_stamp import moment
from harness.records.run_result import RunResult
from harness.records.statuses import FINISHED

STAGES = {"generate": ("generate",), "sync": ("sync",), "rest": ("reward", "sleep", "old_logp", "update", "other")}
"""Stage of the law -> stages of the record that it adds up."""
HALF = 0.5
"""Share of a GPU's memory, `engine.gpu_memory`, up to which the launcher lets a second run onto it."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One run's mean step."""

    size: float
    """Parameters."""
    length: float
    """Response tokens per sample."""
    seconds: dict[str, float]
    """Stage of STAGES -> seconds per step."""
    code: str | None = None
    """`timed_code` of the run."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def step_cost(run: RunResult) -> StepCost | None:
    """None where the record does not tell: no step, no generation time, or a model of unknown size."""
    time, rate = run.time_s, run.tokens_per_s.get("rollout")
    size = num_parameters(run)
    algo = run.config.get("algo", {})
    samples = run.num_steps * (algo.get("num_prompts") or 0) * (algo.get("group_size") or 0)
    generate = time.get("generate")
    if run.status not in FINISHED or not (samples and generate and rate and size):
        return None
    seconds = {name: sum(time.get(s) or 0.0 for s in stages) / run.num_steps for name, stages in STAGES.items()}
    return StepCost(size=size, length=rate * generate / samples, seconds=seconds, code=timed_code(run))


def num_parameters(run: RunResult) -> float | None:
    """Parameters of a decoder, from the shape in its config (a tied head is counted once), or as its summary says.
    None for a mixture of experts: its cost does not follow its size."""
    told = run.summary.get("num_parameters")
    m: dict[str, Any] = run.config.get("model", {})
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    if told or m.get("num_experts") or any(m.get(name) is None for name in names):
        return told
    d, heads = m["hidden_size"], m["head_dim"] * (2 * m["num_heads"] + 2 * m["num_kv_heads"])
    norms = 2 * d + (2 * m["head_dim"] if m.get("family", "qwen3") == "qwen3" else 0)
    return m["vocab_size"] * d + d + m["num_layers"] * (d * heads + 3 * d * m["intermediate_size"] + norms)


def emulates(run: RunResult) -> bool:
    """Were its formats computed in a wider one? Their speed says nothing about hardware."""
    return run.config.get("engine", {}).get("name", "embedded") == "embedded"


def timed_code(run: RunResult) -> str | None:
    """Code that must agree for two speeds to compare: on real kernels the commit, for an engine gets faster."""
    return None if emulates(run) else run.commit


def machine(run: RunResult) -> str:
    """Engine and processor: only step times of one machine compare."""
    hardware = run.hardware
    return f"{run.config.get('engine', {}).get('name')} engine on {hardware.get('gpu') or hardware.get('cpu')}"


def num_sharing(runs: Sequence[RunResult]) -> float:
    """The `at_a_time` of the runs that could share a GPU: their `engine.gpu_memory` is at most HALF."""
    return at_a_time([run for run in runs if run.config.get("engine", {}).get("gpu_memory", HALF) <= HALF])


def at_a_time(runs: Sequence[RunResult]) -> float:
    """Mean number of these runs that were under way while any was; 0 where no record has both times."""
    spans = sorted(
        (moment(run.started_at).timestamp(), moment(run.ended_at).timestamp())
        for run in runs if run.started_at and run.ended_at
    )  # fmt: skip
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return sum(end - start for start, end in spans) / busy if busy else 0.0


def commonest_machine(runs: Sequence[RunResult]) -> str:
    """The machine of most runs."""
    return Counter(machine(run) for run in runs).most_common(1)[0][0]
