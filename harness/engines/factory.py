"""The engine of a run and the check that it can do the run: the one place that knows engines by name."""

from __future__ import annotations

from typing import Any

import torch

from harness.api import Plan, RolloutEngine
from harness.config.compose import Composed, check_supported
from harness.config.decoder_config import decoder_config, shape_to_check
from harness.config.schema import RunConfig
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.weights import LiveWeights
from harness.engines.vllm import builds, settings
from harness.models.decoder import Decoder, DecoderConfig


def check_engine(config: RunConfig, composed: Composed, extras: frozenset[str]) -> None:
    """Raises ValueError, one line, where the run's engine cannot follow the plan, has no kernels for the model's shape
    or does not sample at a temperature, and where the plan's exceptions match no tensor or split a fused matrix. Loads
    nothing.

    A run can be planned, and its records read, where neither its engine nor its GPU is: the device says which build of
    vLLM is asked, and `check_installed` refuses the start. `extras`: what the trainer can compute for a part
    (`Part.needs`).
    """
    if config.engine.name != "vllm":
        check_supported(composed, EmbeddedEngine.supports, config.engine.name, extras)
        if (shape := shape_to_check(config.model)) is not None:
            LiveWeights(shape, composed.plan, torch.device("meta"))  # takes no memory, refuses what a start would
        return
    settings.check_temperature("engine.temperature", config.engine.temperature)
    for i, entry in enumerate(config.evaluations):
        if entry.k:
            settings.check_temperature(f"evaluations.{i}.temperature", entry.temperature)
    build = builds.CUDA if config.trainer.device == "cuda" else builds.CPU
    builds.check_plan(build, composed.plan)
    check_supported(composed, builds.supports(build), config.engine.name, extras)  # before what this machine lacks
    if build is builds.CPU or torch.cuda.is_available():
        settings.check_device(build, config.trainer.device, composed.plan)
    settings.check_shape(build, decoder_config(config.model), composed.plan)


def check_installed(config: RunConfig) -> None:
    """Raises ValueError, one line, where the run's engine is not installed here, or in a build for another device."""
    if config.engine.name == "vllm":
        settings.check_device(settings.installed_build(), config.trainer.device, Plan())


def make_engine(
    config: RunConfig, shape: DecoderConfig, plan: Plan, *, trainer_model: Decoder | None, keeps_log_probs: bool,
    keeps_experts: bool = False, **ids: Any,
) -> RolloutEngine:  # fmt: skip
    """The run's rollout engine. `trainer_model`: the module to sample from under `sampler=trainer`. `keeps_log_probs`,
    `keeps_experts`: what rollouts carry beside tokens, the experts from the embedded engine alone. `ids`: eos_id,
    stop_ids, pad_id, device. Raises ValueError for what it cannot do."""
    if config.engine.name == "vllm":
        from harness.engines.vllm.engine import VLLMEngine

        return VLLMEngine(
            shape, plan, max_batch=config.engine.max_num_seqs or config.engine.max_batch,
            max_length=config.engine.max_model_len, gpu_memory=config.engine.gpu_memory,
            keeps_log_probs=keeps_log_probs, can_sleep=config.engine.sleep, **ids,
        )  # fmt: skip
    return EmbeddedEngine(
        shape, plan, trainer_model=trainer_model, max_batch=config.engine.max_batch, keeps_log_probs=keeps_log_probs,
        keeps_experts=keeps_experts, **ids,
    )  # fmt: skip
