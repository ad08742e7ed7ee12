"""Small models, plans and live vLLM engines that the tests of swaps share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Plan, Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named, format_or_none
from tests.engines.engine_cases import decoder, weights

DEVICE = "cuda"
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; it comes with the extra gpu")
EOS, PAD = -1, 0
QWEN3 = DecoderConfig(
    vocab_size=128, num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=768,
    max_positions=512,
)  # fmt: skip
QWEN2 = replace(QWEN3, qk_norm=False, attention_bias=True)
QWEN3_MOE = replace(QWEN3, intermediate_size=512, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
FAMILIES = {"qwen3": QWEN3, "qwen2": QWEN2, "qwen3_moe": QWEN3_MOE}
PROMPTS = [[3 + i, 4, 5 + 2 * i, 9] for i in range(8)]
LONG = [[3 + (7 * i + 3 * j) % 120 for j in range(80)] for i in range(8)]
"""Prompts of five cache blocks: all but the last are kept and read again."""
NUM_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Case:
    """One format on one architecture."""

    name: str
    weights: str
    acts: str | None = None
    kv: str | None = None
    family: str = "qwen3"

    @property
    def plan(self) -> Plan:
        """Plan that the engine is started with."""
        return Plan(
            rollout_weights=format_named(self.weights),
            rollout_acts=format_or_none(self.acts),
            rollout_kv=format_or_none(self.kv),
        )

    @property
    def is_quantized(self) -> bool:
        """Are the linears sent as codes?"""
        return format_named(self.weights).tile is not None


FORMATS = (
    Case(name="bf16", weights="bf16", acts="bf16"),
    Case(name="fp16", weights="fp16", acts="fp16"),
    Case(name="fp8_tensor", weights="e4m3_tensor", acts="e4m3_token"),
    Case(name="fp8_channel", weights="e4m3_channel", acts="e4m3_token"),
    Case(name="fp8_block", weights="e4m3_block", acts="e4m3_1x128"),
    Case(name="int8", weights="int8_channel", acts="int8_token"),
    Case(name="w8a16", weights="int8_g128"),
    Case(name="int4", weights="int4_g32"),
    Case(name="nvfp4", weights="nvfp4"),
)
KV8 = (replace(FORMATS[0], name="bf16+kv8", kv="e4m3_kv"), replace(FORMATS[3], name="fp8_channel+kv8", kv="e4m3_kv"))
BIASED = (replace(FORMATS[3], name="fp8_channel, qwen2", family="qwen2"),
          replace(FORMATS[7], name="int4, qwen2", family="qwen2"))  # fmt: skip

MIXTURES = tuple(
    replace(case, name=f"{case.name}, experts", family="qwen3_moe")
    for case in FORMATS
    if case.name not in ("fp8_tensor", "w8a16", "int8")  # fused experts have no kernel for them (`builds.py`)
)


def model_of(case: Case, seed: int) -> Decoder:
    """A random decoder whose distributions are as sharp as a trained one's; its linears are bf16 numbers."""
    model = decoder(FAMILIES[case.family], seed, std=0.08)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    return model


@contextmanager
def started(config: DecoderConfig, plan: Plan, **options: Any) -> Iterator[Any]:
    """A live engine with CUDA graphs of the batches used here; ended on the way out, whatever happened."""
    from harness.engines.vllm.engine import VLLMEngine

    settings = {"device": DEVICE, "max_batch": 8, "max_length": 256, "gpu_memory": 0.06} | options
    engine = VLLMEngine(config, plan, eos_id=EOS, pad_id=PAD, **settings)
    try:
        yield engine
    finally:
        engine.close()


def embedded(model: Decoder, plan: Plan, extra: Sequence[tuple[str, Tensor]] = ()) -> EmbeddedEngine:
    """The emulation on the CPU with the same weights."""
    engine = EmbeddedEngine(model.config, plan, eos_id=EOS, pad_id=PAD)
    engine.load_weights(iter([*weights(model), *extra]))
    return engine


def greedy(engine: Any, prompts: Sequence[Sequence[int]] = PROMPTS, num_tokens: int = NUM_TOKENS) -> Rollout:
    """The most probable continuation, on the CPU."""
    out = engine.generate(prompts, num_samples=1, max_new_tokens=num_tokens, temperature=0.0, seed=0)
    return replace(out, token_ids=out.token_ids.cpu(), logp=out.logp.cpu(), lengths=out.lengths.cpu())


def same_context(a: Rollout, b: Rollout) -> Tensor:
    """[B, T] bool: tokens before which both read the same."""
    differs = (a.token_ids != b.token_ids).int().cumsum(1)
    return torch.cat((torch.zeros(len(differs), 1, dtype=torch.int), differs[:, :-1]), 1) == 0


def gap(a: Rollout, b: Rollout) -> float:
    """Largest |difference of log-probs| in nats where both chose after the same tokens."""
    return float((a.logp - b.logp).abs()[same_context(a, b)].max())


def mean_gap(a: Rollout, b: Rollout) -> float:
    """Mean |difference of log-probs| in nats where both chose after the same tokens."""
    return float((a.logp - b.logp).abs()[same_context(a, b)].mean())


def pointers(engine: Any) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Address, shape and dtype of every parameter and buffer of the live model."""
    held = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {name: (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) for name, tensor in held}


def contents(engine: Any) -> dict[str, Tensor]:
    """A copy of every parameter of the live model, as bytes. Left out: scales of inputs that NVFP4 experts have but do
    not read, and that nobody sets."""
    return {
        name: p.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for name, p in engine.model.named_parameters()
        if not name.endswith("_input_global_scale")
    }  # fmt: skip


def checkpoint_of(engine: Any, model: Decoder) -> list[tuple[str, Tensor]]:
    """Tensors that `load_weights` would push: codes and scales by checkpoint name."""
    from harness.engines.vllm.export import export
    from harness.engines.weight_stream import read_stream

    stream = read_stream(weights(model), engine.shapes, engine.plan)
    return export(stream, engine.plan, engine.shapes, engine.device).tensors
