"""The battery's real runs: every method of the registry takes steps, resumes bit for bit, keeps its plan, and acts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.api import Plan, weight_format
from harness.config.compose import compose, has_hook, plan_json
from harness.foundation.provenance import tensors_hash
from harness.foundation.state_files import load_state, save_state
from harness.run.loop import grpo_step
from harness.run.run import Run
from methods import METHODS
from tests.loss_cases import Algo, random_batch
from tests.objective_cases import objective
from tests.toy import small_config, small_run

METHOD_NAMES = sorted(METHODS)
ACTING = sorted(name for name, method in METHODS.items() if method.parts)
LOSS_HOOKS = ("correct", "correct_update", "token_loss")
FIT = {"updates": 2, "sequences": 16, "validate_every": 1}
QUICK = {"KD": {"steps": 2, "num_responses": 1}, "RILQ": FIT, "RILQRefresh": FIT, "RILQInit": FIT}
"""Knobs of preparations that train, for a run of seconds."""
ACTS_WITH = {
    "keep_sampling_mask": ["engine.top_p=0.9"],
    "lr_decay": ["knobs.LengthDecay.period=1"],
    "max_age": ["algo.staleness=1", "knobs.MaxAge.steps=0"],
}
"""Settings of methods that wait for something which two ordinary steps do not have."""


MOE = (
    "task=sort", "task.n=2", "model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32",
    "model.intermediate_size=64", "base.target_accuracy=0.3", "base.max_steps=120",
)  # fmt: skip
"""A mixture of experts, and a base of it within seconds."""
NEEDS_MIXTURE = frozenset({"router_replay", "router_replay_r2", "rspo"})


def overrides(name: str, *more: str) -> list[str]:
    """A short run of a method at its default precision, two updates per batch."""
    more = (*(MOE if name in NEEDS_MIXTURE else ()), *more)
    parts = {type(part).__name__ for part in METHODS[name].parts}
    quick = [f"knobs.{part}.{k}={v}" for part, values in QUICK.items() if part in parts for k, v in values.items()]
    return [f"method={name}", "algo.num_minibatches=2", *quick, *more]


def step(run: Run) -> dict[str, float]:
    """One step of a run."""
    row = grpo_step(run)
    run.step += 1
    return row


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_two_steps_with_a_resume_between(name: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, overrides(name))
    rows = [step(run)]
    save_state(tmp_path / "state.pt", run.state())
    rows.append(step(run))
    for row in rows:
        assert math.isfinite(row["train/loss"]) and math.isfinite(row["train/grad_norm"])
    assert run.passport is not None
    plan = run.composed.plan
    for record in run.passport.weights:
        fmt = weight_format(plan, record.name)
        assert fmt is None or record.format == fmt.name
    again = small_run(tmp_path, overrides(name))
    again.restore(load_state(tmp_path / "state.pt"))
    repeated = step(again)
    assert tensors_hash(again.trainer.weights()) == tensors_hash(run.trainer.weights())
    same = [key for key in rows[1] if key.startswith(("train/", "mismatch/", "reward/", "part/"))]
    assert {k: repeated[k] for k in same} == pytest.approx({k: rows[1][k] for k in same}, abs=0, rel=0, nan_ok=True)


@cache
def plain_hash(precision: str, folder: Path) -> tuple[str, str]:
    """Two steps without any part at a precision: (weights of the trainer, weights of the engine)."""
    run = small_run(folder, ["method=bf16" if precision in ("bf16", "fp32") else "method=naive",
                             f"precision={precision}", "algo.num_minibatches=2"])  # fmt: skip
    step(run), step(run)
    assert run.passport is not None
    return tensors_hash(run.trainer.weights()), str([record.hash for record in run.passport.weights])


@pytest.mark.parametrize("name", ACTING)
def test_the_parts_change_something(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    method = METHODS[name]
    logp, batch = random_batch("battery acts", name, size=(24, 5), spread=2.0)
    gap = (batch.old_logp - batch.rollout_logp).square()
    batch = replace(batch, extras={"rollout_kl": gap, "router_shift": gap})
    if any(has_hook(part, hook) for part in method.parts for hook in LOSS_HOOKS):
        algo = Algo(denom=method.denom or "original")
        without = objective((), logp, batch, Algo())
        found = objective(method.parts, logp, batch, algo)
        if not all(torch.equal(a, b) for a, b in zip(found, without, strict=True)):
            return
    words = overrides(name, *ACTS_WITH.get(name, ()))
    config = small_config(*words)
    plan = compose(config).plan
    if plan_json(plan) != plan_json(
        replace(Plan(), **{k: getattr(plan, k) for k in ("rollout_weights", "rollout_acts", "rollout_kv")})
    ):
        return
    folder = tmp_path_factory.mktemp("plain")
    run = small_run(folder, words)
    step(run), step(run)
    assert run.passport is not None
    hashes = tensors_hash(run.trainer.weights()), str([record.hash for record in run.passport.weights])
    assert hashes != plain_hash(config.precision.name, folder)
