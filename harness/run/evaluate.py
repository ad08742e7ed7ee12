"""Evaluation apart from training: a saved policy, or any model folder, asked what `evaluations` lists.

The weights answer twice, as in a run: in the reference precision, which on vLLM is BF16, and where the precision is
quantized as rolled. One engine lives at a time. Left out: the rollout site of methods whose sampler is more than the
quantized weights (`Part.sync` with prepared tensors, adapters at the rollout); only their run has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.api import Plan, RolloutEngine
from harness.config.compose import Composed, check_passport, has_hook
from harness.config.schema import RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.factory import check_installed, make_engine
from harness.models.checkpoint import load_config, load_decoder
from harness.numerics.formats import at_rollout, format_named
from harness.records.run_result import TaskEvalRecord
from harness.run.checks import check, check_device
from harness.start.prepare import evaluation_tasks
from harness.tasks import check_ends, token_ids
from harness.trainers.evaluation import REFERENCE, Site
from harness.trainers.task_evaluation import Asked, asked, task_evaluation

DEPLOYED = "bf16"
"""Reference precision on vLLM."""


def questions(config: RunConfig, folder: Path) -> list[Asked]:
    """Evaluations of the weights in `folder`. Raises ValueError, one line, for what cannot be asked, and where this
    machine lacks the device or the engine. Nothing is loaded."""
    check(config)
    check_device(config)
    check_installed(config)
    if not config.evaluations:
        raise ValueError(
            "evaluations=[]: nothing is asked; give 'evaluations=[{task:gsm8k,path:FOLDER,k:4}]', or a task made here: "
            "'evaluations=[{task:sort,num:256}]'"
        )
    tasks = evaluation_tasks(replace(config, model=replace(config.model, path=str(folder))))
    check_ends(tasks)
    return asked(config.evaluations, tasks)


def evaluate_folder(
    config: RunConfig, folder: Path, ones: list[Asked], step: int, tell: Callable[[TaskEvalRecord], None]
) -> tuple[list[TaskEvalRecord], list[str]]:
    """(records, remarks) of the evaluations `ones` (see `questions`) of the weights in `folder`, whose policy took
    `step` steps. `tell` hears of each record as it is made."""
    composed, model = check(config), load_decoder(folder)
    weights: list[tuple[str, Tensor]] = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    reference = DEPLOYED if config.engine.name == "vllm" else REFERENCE
    records: list[TaskEvalRecord] = []

    def ask(site: Site, precision: str, plan: Plan) -> None:
        engine = _engine(config, folder, site, plan, ones)
        try:
            engine.load_weights(iter(weights))
            check_passport(plan, engine.realized_plan())
            for one in ones:
                records.append(task_evaluation(engine, one, site=site, precision=precision, step=step))
                tell(records[-1])
        finally:
            engine.close()

    ask("reference", reference, Plan(rollout_weights=format_named(reference)))
    if reasons := list(_in_the_way(config.method, composed)):
        return records, [
            f"not asked as rolled: {'; '.join(reasons)}, and a model folder holds the weights alone. What a run lists "
            "in its own `evaluations` is asked as rolled while it trains; for the weights in a plain format: "
            f"lowbit eval {folder} method=naive precision=FORMAT 'evaluations=[...]'"
        ]
    if config.precision.name != reference:
        ask("rollout", config.precision.name, composed.plan)
    return records, []


def _engine(config: RunConfig, folder: Path, site: Site, plan: Plan, ones: list[Asked]) -> RolloutEngine:
    """An engine of its own for one site."""
    task, shape = ones[0].task, load_config(folder)
    ids: dict[str, Any] = token_ids(task) | {"device": config.trainer.device}
    if site == "reference" and config.engine.name == "embedded":
        return EmbeddedEngine(shape, plan, max_batch=config.engine.max_batch, **ids)
    return make_engine(config, shape, plan, trainer_model=None, keeps_log_probs=False, **ids)


def _in_the_way(method: str, composed: Composed) -> Iterator[str]:
    """Reasons why weights alone are not the rollout site, in words within a sentence."""
    if composed.plan.sampler == "trainer":
        yield f"{method} samples with the trainer's own module"
    if at_rollout(composed.plan.adapters) is not None:
        yield f"{method} keeps adapters at the rollout"
    for part in composed.parts:
        if any(has_hook(part, hook) and hook not in part.idle(composed.plan) for hook in ("sync", "after_sync")):
            yield f"{type(part).__name__} of {method} pushes more than the weights (scales, noise or adapters)"
