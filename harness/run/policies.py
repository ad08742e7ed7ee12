"""The trained policy, kept: a Hugging Face folder, and the codes of the run's own rollout format beside it.

    policies/<sweep>/<run_id>/step-<N>/       sharded safetensors, tokenizer, generation_config
    policies/<sweep>/<run_id>/quantized/      codes and scales as a compressed-tensors checkpoint

It is saved before the last evaluation. Adapters that are trained are merged into the first. The codes are those that a
push sends; scales of a quantized KV cache are the engine's to calibrate and are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from harness.api import Step, WeightStream, base_dtype
from harness.config.compose import Composed
from harness.config.schema import Launch, RunConfig
from harness.engines.vllm.export import export
from harness.engines.vllm.settings import quantization_config
from harness.engines.weight_stream import read_stream
from harness.models.checkpoint import CONFIG, INDEX, WEIGHTS
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.models.shards import write_folder
from harness.numerics.formats import at_rollout
from harness.records import paths
from harness.records.policies import QUANTIZED, STEP


class Trained(Protocol):
    """A run as far as its policy can be written down, whichever trainer holds it."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def composed(self) -> Composed: ...
    @property
    def folder(self) -> Path:
        """Hugging Face folder of the base: config.json, tokenizer, dtype."""
        ...

    @property
    def shape(self) -> DecoderConfig: ...
    @property
    def step(self) -> int: ...
    def weights(self) -> WeightStream:
        """Masters by checkpoint name, adapters too."""
        ...

    def policy_weights(self) -> WeightStream:
        """The weights that are evaluated in the reference precision."""
        ...


def is_due(launch: Launch, step: int, steps: int) -> bool:
    """Is the policy saved after this step? `launch.save` says so: at the end, or also after every N steps."""
    kind, _, every = launch.save.partition(":")
    return kind != "none" and (step == steps or (bool(every) and step % int(every) == 0))


def save_policy(run: Trained, launch: Launch, run_id: str) -> list[str]:
    """Save the policy as it is now, and at the end of a run with `launch.save=quantized` its codes. Returns remarks on
    what cannot be kept. Raises OSError where it cannot be written."""
    home = paths.policy_folder(launch.results, launch.sweep, run_id)
    save_hf(run, home / f"{STEP}{run.step}")
    if launch.save != QUANTIZED or run.step < run.config.trainer.steps:
        return []
    try:
        save_quantized(run, home / QUANTIZED)
    except ValueError as error:
        return [f"no quantized checkpoint: {error}"]
    return []


def save_hf(run: Trained, folder: Path) -> None:
    """Write the policy in the dtype in which it is evaluated: on vLLM that of its base, else float32."""
    dtype = stored_dtype(run.folder) if run.config.engine.name == "vllm" else torch.float32
    config = base_config(run.folder) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_folder(folder, config, _cast(run.policy_weights(), dtype), run.folder)


def save_quantized(run: Trained, folder: Path) -> None:
    """Write the codes and scales of a push without noise. Raises ValueError where the rollout has no codes, or some
    that vLLM does not read."""
    plan, shape = run.composed.plan, run.shape
    if at_rollout(plan.adapters) is not None:
        raise ValueError(f"method={run.config.method} keeps adapters at the rollout; its merged policy is saved")
    words = quantization_config(plan, shape)
    if words is None:
        raise ValueError(f"precision={run.config.precision.name} has no codes")
    step = Step(index=run.step, total=run.config.trainer.steps, seed=run.config.seed, purpose="eval")
    shapes = tensor_shapes(shape)
    stream = read_stream(run.composed.sync(run.weights(), step), shapes, plan)
    dtype = base_dtype(plan)
    found = export(stream, plan, shapes, next(iter(run.weights()))[1].device)
    config = base_config(run.folder)
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": words}
    plain = set(shapes)
    tensors = ((name, tensor.to(dtype) if name in plain and name not in found.quantized else tensor)
               for name, tensor in found.tensors)  # fmt: skip
    write_folder(folder, config, tensors, run.folder)


def base_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as it is, without its dtype and what transformers notes of itself."""
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in ("dtype", "transformers_version")}


def stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of the first tensor of a model folder."""
    index = folder / INDEX
    first = min(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else WEIGHTS
    with safe_open(folder / first, framework="pt") as file:
        return file.get_tensor(min(file.keys())).dtype


def _cast(tensors: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(dtype)
