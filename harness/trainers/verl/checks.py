"""Refusals of runs that verl cannot do, before anything starts, each with its reason.

Neither verl nor Ray is imported.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from harness.api import Part, Plan, weight_format
from harness.config.compose import FIRST, Composed, compose, has_hook
from harness.config.decoder_config import shape_to_check
from harness.config.schema import Launch, RunConfig
from harness.engines.vllm.shards import Shard, check_shards
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.trainers.local.policy import is_loss_scaled

VERSION = "0.9.1"
EXTRAS = frozenset({"ref_logp"})
"""Extras that the trainer can compute for a part."""
HOOKS = {
    "refit": "it wants the whole module in one process",
    "during_update": "verl's workers run their own passes",
    "update_lr_factor": "verl's workers step by their own schedule",
}
"""Hook -> why verl's loop cannot run it."""
ANSWER_S = 30.0
"""Seconds that a cluster has to answer."""


def check(config: RunConfig, composed: Composed) -> None:
    """Raises ValueError, one line, for what cannot be had under verl."""
    if config.engine.name != "vllm":
        raise ValueError(f"engine={config.engine.name}: trainer=verl drives vLLM's servers; valid: vllm")
    plan, method = composed.plan, composed.method.name
    if plan.sampler == "trainer" or plan.residual is not None:
        raise ValueError(f"trainer=verl: {method} samples with the embedded engine's own code; choose trainer=local")
    if plan.samplers:
        raise ValueError(
            f"trainer=verl: {method} has several samplers a batch, verl's servers one; choose trainer=local"
        )
    _check_partial(config)
    for part in composed.parts:
        _check_part(part, plan)
    if config.task.options.get("stop"):
        raise ValueError(
            f"task.options.stop={config.task.options['stop']}: verl's servers end a response at EOS alone; valid under "
            "trainer=verl: []"
        )


def _check_part(part: Part, plan: Plan) -> None:
    name = type(part).__name__
    for hook, reason in HOOKS.items():
        if has_hook(part, hook) and hook not in part.idle(plan):
            without = f"knobs.{name}.{part.idle_by[hook]} or " if hook in part.idle_by else ""
            raise ValueError(f"trainer=verl: {name}.{hook} cannot run: {reason}; choose {without}trainer=local")
    if lacking := sorted(part.needs(FIRST) - EXTRAS):
        raise ValueError(f"trainer=verl: {name} needs {', '.join(lacking)}; verl's workers offer {', '.join(EXTRAS)}")


def _check_partial(config: RunConfig) -> None:
    if size := config.algo.partial_rollouts:
        raise ValueError(
            f"algo.partial_rollouts={size}: verl's servers finish every response; valid under trainer=verl: 0"
        )


def check_launch(config: RunConfig, launch: Launch) -> None:
    """Raises ValueError, one line, for numbers of GPUs that the batch or the model does not divide by, and for what
    verl's workers would not do of it."""
    split = launch.sequence_parallel
    if launch.gpus % split:
        raise ValueError(
            f"launch.sequence_parallel={split}: launch.gpus={launch.gpus} of a machine do not divide by it; valid: "
            + _divisors(launch.gpus)
        )
    world = launch.nodes * launch.gpus // split
    if launch.save.startswith("every:"):
        raise ValueError(
            f"launch.save={launch.save}: trainer=verl keeps the last policy alone; valid: none, hf, quantized"
        )
    algo = config.algo
    for prompts in (-(-algo.num_prompts // algo.num_minibatches), algo.num_prompts // algo.num_minibatches):
        if (samples := prompts * algo.group_size) % world:
            among = f"{world} GPUs" if split == 1 else f"{world} groups of {split} GPUs"
            raise ValueError(
                f"launch.gpus={launch.gpus}: {samples} samples of an update do not divide by {among}; change "
                "algo.num_prompts or algo.group_size"
            )
    if launch.gpus % launch.tensor_parallel:
        raise ValueError(
            f"launch.tensor_parallel={launch.tensor_parallel}: an engine's GPUs are of one machine, and launch.gpus="
            f"{launch.gpus} does not divide by them"
        )
    if launch.tensor_parallel > 1 and (shape := shape_to_check(config.model)) is not None:
        check_shared_engine(launch.tensor_parallel, compose(config).plan, shape)
    if launch.offload != "none" and config.trainer.device == "cpu":
        raise ValueError(f"launch.offload={launch.offload}: a trainer on a CPU is in the host's memory; valid: none")
    if launch.offload == "host" and is_loss_scaled(compose(config).plan):
        raise ValueError(
            f"launch.offload=host: {config.method} scales its loss, and gradients on the host cannot be scaled back; "
            "valid: none, params, optimizer, all"
        )
    if split > 1:
        _check_heads(config, split)
    if config.trainer.device == "cpu" and launch.fp8_kernels not in ("best", "emulated"):
        raise ValueError(f"launch.fp8_kernels={launch.fp8_kernels}: needs a GPU; valid on a CPU: best, emulated")


def check_shared_engine(size: int, plan: Plan, shape: DecoderConfig) -> None:
    """Raises ValueError, one line, for an engine that `size` GPUs cannot share: heads, groups of codes that a cut of
    the columns would break, a cache whose scales are of all heads."""
    if size == 1:
        return
    what = f"launch.tensor_parallel={size}"
    check_shards(shape, size, what)
    if plan.rollout_kv is not None:
        raise ValueError(f"{what}: the scales of an FP8 cache are those of all heads; valid with it: 1")
    for name, whole in tensor_shapes(shape).items():
        fmt, span = weight_format(plan, name), Shard(config=shape, size=size).span(name)
        if fmt is None or fmt.tile is None or span is None or not (step := fmt.tile[span[0]]):
            continue
        if (width := span[2]) % step:
            channels = whole[span[0]]
            raise ValueError(f"{what}: {width} of {channels} channels of {name} are no whole groups of {step}")


def _check_heads(config: RunConfig, split: int) -> None:
    """Raises ValueError where heads or key-value heads do not divide by the GPUs that share a sequence."""
    if (shape := shape_to_check(config.model)) is None:
        return
    heads = math.gcd(shape.num_heads, shape.num_kv_heads)
    if heads % split:
        raise ValueError(
            f"launch.sequence_parallel={split}: {shape.num_heads} heads and {shape.num_kv_heads} key-value heads do "
            f"not divide by it; valid: {_divisors(heads)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_installed() -> None:
    """Raises ValueError, one line, where verl is not here or of another version."""
    if importlib.util.find_spec("verl") is None:
        raise ValueError('trainer=verl: verl is not installed; pip install -e ".[gpu]", or make test-verl on a CPU')
    if (found := metadata.version("verl")) != VERSION:
        raise ValueError(f"trainer=verl: verl {found} is installed; valid: {VERSION}")


@cache
def check_cluster(nodes: int, address: str | None) -> None:
    """Raises ValueError, one line, where several machines have no Ray cluster, and where one is named and none answers
    there, as `ray status` sees it."""
    if address is None:
        if nodes > 1:
            raise ValueError(f"launch.nodes={nodes}: several machines need a running cluster; give launch.ray_address")
        return
    ask = [str(Path(sys.executable).with_name("ray")), "status", "--address", address]
    with suppress(subprocess.TimeoutExpired):
        if subprocess.run(ask, capture_output=True, timeout=ANSWER_S, check=False).returncode == 0:
            return
    raise ValueError(
        f"launch.ray_address={address}: no Ray cluster answers there; `ray start --head` starts one; valid: auto, "
        "HOST:PORT, or null for one of this run's own"
    )
