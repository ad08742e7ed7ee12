"""Everything alive in a run, built from its configuration: model, trainer, engine and the engine of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.api import Plan, Step, sampler_plans
from harness.config.schema import Launch, RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.factory import make_engine
from harness.numerics.formats import format_named
from harness.run.checks import check, check_device
from harness.run.gpu_sharing import reserved_gib
from harness.run.run import Run, Served
from harness.start.prepare import evaluation_tasks, held_out, prepare, start_hashes, start_of
from harness.tasks import token_ids
from harness.trainers.evaluation import REFERENCE
from harness.trainers.local.forward import Thrift
from harness.trainers.local.policy import policy
from harness.trainers.local.trainer import DIVERGENCES, LocalTrainer
from harness.trainers.task_evaluation import asked


def build(
    config: RunConfig, launch: Launch, should_stop: Callable[[], bool] = lambda: False
) -> tuple[Run, dict[str, str | None]]:
    """Everything alive in a run, at step 0, and the hashes of what it starts from. Raises ValueError on bad input, and
    Unfinished where `should_stop` ends the training of a base."""
    composed, device = check(config), config.trainer.device
    check_device(config)
    start = start_of(config, launch, should_stop)
    model = prepare(composed, config, start, launch).to(device)
    shape = model.config
    model = policy(model, composed, config.base_seed, launch.fp8_kernels)
    algo, needs = config.algo, composed.needs(Step(index=0, total=config.trainer.steps, seed=config.seed))
    is_exact, keeps_log_probs = composed.plan.sampler == "trainer", bool(needs & {*DIVERGENCES, "allowed_ids"})
    trainer = LocalTrainer(
        model, config.trainer, composed.plan, temperature=config.engine.temperature,
        micro_batch_rows=config.engine.max_batch if is_exact else None, micro_batch_tokens=launch.micro_batch_tokens,
        num_updates=config.trainer.steps * algo.num_updates,
        wants_entropy_grad=algo.entropy_coef != 0, wants_reference=algo.kl_coef != 0 or "ref_logp" in needs,
        wants_shadow="shadow" in needs, lr_factor=composed.lr_factor, thrift=Thrift.of(launch, config.trainer),
    )  # fmt: skip
    task = start.task
    kept: dict[str, Any] = {"keeps_log_probs": keeps_log_probs, "keeps_experts": "routing" in needs}
    ids: dict[str, Any] = token_ids(task) | {"device": device}
    before = reserved_gib(device)
    engine = make_engine(
        config, shape, composed.plan, trainer_model=trainer.model if is_exact else None, **kept, **ids
    )  # fmt: skip
    others = [
        Served(
            name=sampler.name, plan=plan,
            engine=make_engine(config, shape, plan, trainer_model=None, **kept, **ids),
        )
        for sampler, plan in zip(composed.plan.samplers or (), sampler_plans(composed.plan)[1:], strict=True)
    ]  # fmt: skip
    share = {"engine": reserved_gib(device) - before} if device == "cuda" else {}
    reference = EmbeddedEngine(
        shape, Plan(rollout_weights=format_named(REFERENCE)), max_batch=config.engine.max_batch, for_evaluation=True,
        **ids,
    )  # fmt: skip
    run = Run(
        config=config, composed=composed, task=start.task, trainer=trainer, engine=engine, reference=reference,
        others=others,
        folder=start.folder, max_new_tokens=config.engine.max_new_tokens or start.task.max_new_tokens,
        eval_items=held_out(config, start.task), asked=asked(config.evaluations, evaluation_tasks(config)),
    )  # fmt: skip
    run.keep_peaks(share)
    return run, start_hashes(start, [one.task for one in run.asked])
