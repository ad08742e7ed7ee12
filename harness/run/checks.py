"""Refusals before a run starts: what its method, engine, trainer and this machine cannot do. Nothing is loaded."""

from __future__ import annotations

import torch

from harness.api import Step
from harness.config.compose import Composed, compose
from harness.config.decoder_config import decoder_config, shape_to_check
from harness.config.schema import Launch, RunConfig
from harness.engines.embedded.engine import NO_EXACT_MIXTURE
from harness.engines.factory import check_engine, check_installed
from harness.models.decoder import tensor_shapes
from harness.tasks import EMBEDDED, has_demonstrations
from harness.trainers.local.forward import Thrift
from harness.trainers.local.policy import sixteen_bits
from harness.trainers.local.trainer import DIVERGENCES, EXTRAS, ROUTING
from harness.trainers.verl import checks


def check(config: RunConfig) -> Composed:
    """The composed method of a run that can work here. Raises ValueError, one line, before anything is loaded."""
    composed = compose(config)
    if config.model.path is None:
        decoder_config(config.model)
    if config.trainer.name == "verl":
        checks.check(config, composed)
    _check_parts(config, composed)
    _check_positions(config)
    _check_mixture(config, composed)
    _check_staleness(config)
    _check_partial(config, composed)
    _check_evaluations(config, composed)
    check_engine(config, composed, EXTRAS)
    return composed


def _check_parts(config: RunConfig, composed: Composed) -> None:
    shape = shape_to_check(config.model)
    shapes = None if shape is None else tensor_shapes(shape)
    for part in composed.parts:
        part.check(composed.plan, composed.parts, shapes)
        if part.demonstrations is not None and not has_demonstrations(config.task.name):
            own, other = (f"knobs.{type(part).__name__}.{setting}" for setting in part.demonstrations)
            tasks = ", ".join(name for name in EMBEDDED if has_demonstrations(name))
            raise ValueError(
                f"{own}: task={config.task.name} has no demonstrations; valid: {other}, or a task with some: {tasks}"
            )


def _check_positions(config: RunConfig) -> None:
    """Raises ValueError where a folder's model has too few positions for the longest prompt with a whole response (for
    a model made here the task's own prompts tell), or any model fewer than the engine is to make room for: an engine
    would stop at the first long one, or take fewer silently."""
    if (shape := shape_to_check(config.model)) is None:
        return
    positions = shape.max_positions
    asked = [("engine.max_new_tokens", config.engine.max_new_tokens, config.task.options)]
    asked += [
        (f"evaluations.{i}.max_new_tokens", e.max_new_tokens, e.options) for i, e in enumerate(config.evaluations)
    ]
    for field, new, options in asked if config.model.path is not None else ():
        given = options.get("max_prompt_tokens")  # whose type the task checks
        prompt = given if isinstance(given, int) else 1
        if new is not None and prompt + new > positions:
            raise ValueError(
                f"{field}={new}: behind a prompt of {prompt} tokens it needs {prompt + new} positions, the model has "
                f"{positions}; valid: up to {positions - prompt}, or model.max_positions={prompt + new}"
            )
    room = config.engine.max_model_len
    if room is not None and room > positions:
        raise ValueError(
            f"engine.max_model_len={room}: the model has {positions} positions; valid: 1 to {positions}, or "
            f"model.max_positions={room}"
        )


def _check_mixture(config: RunConfig, composed: Composed) -> None:
    needs = composed.needs(Step(index=0, total=config.trainer.steps, seed=config.seed))
    if (shape := shape_to_check(config.model)) is None:
        return
    num_experts = shape.num_experts
    if composed.plan.sampler == "trainer" and num_experts:
        raise ValueError(f"method={config.method}: {NO_EXACT_MIXTURE}")
    if config.trainer.name == "verl" and num_experts:
        raise ValueError(
            f"num_experts={num_experts}: mixtures of experts were never trained under verl; choose trainer=local"
        )
    if config.engine.name == "vllm" and "routing" in needs:
        raise ValueError(
            f"method={config.method} engine=vllm: the sampler's experts are not read back from vLLM; choose engine="
            "embedded, or router_replay_r2, which replays the trainer's own"
        )
    if needs & ROUTING and not num_experts:
        raise ValueError(
            f"method={config.method} model={config.model.name}: replays or compares the choice of experts, and a "
            "dense model has none; choose a mixture of experts such as model=moe_xs"
        )


def _check_staleness(config: RunConfig) -> None:
    age, steps = config.algo.staleness, config.trainer.steps
    if age >= steps:
        raise ValueError(
            f"algo.staleness={age}: the start would sample all trainer.steps={steps} steps; valid: 0 to {steps - 1}"
        )


def _check_partial(config: RunConfig, composed: Composed) -> None:
    size, algo = config.algo.partial_rollouts, config.algo
    if not size:
        return
    needs = composed.needs(Step(index=0, total=config.trainer.steps, seed=config.seed))
    beside = sorted(needs & {"routing", "allowed_ids", *DIVERGENCES})
    reasons = {
        "algo.dynamic_sampling=true drops groups that have ended": algo.dynamic_sampling,
        f"algo.staleness={algo.staleness} gives every batch one age": algo.staleness > 0,
        f"{config.method} samples with the trainer's own module, whole responses at a time": (
            composed.plan.sampler == "trainer"
        ),
        f"{config.method} has several samplers in a batch": bool(composed.plan.samplers),
        f"{config.method} needs {', '.join(beside)} of whole responses": bool(beside),
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise ValueError(f"algo.partial_rollouts={size}: {found[0]}; valid beside it: algo.partial_rollouts=0")


def _check_evaluations(config: RunConfig, composed: Composed) -> None:
    for i, entry in enumerate(config.evaluations):
        if composed.plan.sampler == "trainer" and entry.top_p < 1.0:
            raise ValueError(
                f"evaluations.{i}.top_p={entry.top_p}: {config.method} samples with the trainer's own module, which "
                "leaves no token out; valid: 1.0"
            )


def check_device(config: RunConfig) -> None:
    """Raises ValueError, one line, where the run's device is not on this machine."""
    if config.trainer.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda: no CUDA device is visible; valid: trainer.device=cpu")


def check_launch(config: RunConfig, launch: Launch) -> None:
    """Raises ValueError, one line, where `launch` asks for what the run's trainer does not do, or for two things that
    exclude each other, on whatever machine."""
    if launch.compile:
        _check_compile(config, launch)
    if config.trainer.name == "verl":
        checks.check_launch(config, launch)
    elif launch.gpus * launch.nodes != 1:
        raise ValueError(
            f"launch.nodes={launch.nodes} launch.gpus={launch.gpus}: trainer={config.trainer.name} works on one "
            "GPU; choose trainer=verl"
        )
    else:
        for name, usual in (("sequence_parallel", 1), ("tensor_parallel", 1), ("offload", "none")):
            if (value := getattr(launch, name)) != usual:
                raise ValueError(f"launch.{name}={value}: trainer=verl alone does it; valid: {usual}, or trainer=verl")


def _check_compile(config: RunConfig, launch: Launch) -> None:
    plan, shape = compose(config).plan, shape_to_check(config.model)
    if (rounded := sixteen_bits(plan)) is not None and not Thrift.of(launch, config.trainer).native_16bit:
        raise ValueError(f"launch.compile=true: the trainer emulates {rounded.name}; add launch.native_16bit=true")
    if plan.sampler == "trainer":
        raise ValueError("launch.compile=true: the sampler runs the trainer's layers; valid: launch.compile=false")
    if shape is not None and shape.num_experts:
        raise ValueError(
            "launch.compile=true: the sizes of a mixture of experts change in every pass; valid: launch.compile=false"
        )


def check_place(config: RunConfig, launch: Launch) -> None:
    """Raises ValueError, one line, where this machine does not have what the run wants: its device, its engine, verl, a
    cluster, its GPUs; and as `check_launch`."""
    check_device(config)
    check_launch(config, launch)
    if config.trainer.name == "verl":
        checks.check_installed()
        checks.check_cluster(launch.nodes, launch.ray_address)
        has = torch.cuda.device_count()
        if config.trainer.device == "cuda" and launch.ray_address is None and launch.gpus > has:
            raise ValueError(f"launch.gpus={launch.gpus}: {has} CUDA devices are visible; valid: 1 to {has}")
    check_installed(config)
