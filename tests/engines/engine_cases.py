"""Small models, plans and engines that the engine tests share, and the log-probs they must reproduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.api import Plan, Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.models.decoder import Decoder, DecoderConfig, response_hidden
from harness.numerics.formats import format_named
from harness.numerics.logprobs import selected_logp

QWEN3 = DecoderConfig(
    vocab_size=24, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64,
    max_positions=128,
)  # fmt: skip
QWEN2 = replace(QWEN3, qk_norm=False, attention_bias=True, head_dim=8, tie_embeddings=False)
MOE = replace(QWEN3, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32)
FP32 = Plan(rollout_weights=format_named("fp32"))
WEIGHTS = (
    "fp32", "bf16", "fp16", "e4m3_tensor", "e4m3_channel", "e4m3_block", "int8_channel", "int8_channel_ct",
    "int4_g32", "int4_g32_asym", "int3_g32", "int2_g16_asym", "int4_g32_qat", "nvfp4", "nvfp4_torchao", "mxfp4",
    "mxfp8",
    "nf4", "nf4_dq",
)  # fmt: skip
PAIRS = (
    ("int8_channel", "int8_token"), ("e4m3_channel", "e4m3_token"), ("e4m3_block", "e4m3_1x128"),
    ("nvfp4", "nvfp4_act"), ("mxfp8", "mxfp8"), ("bf16", "bf16"), ("fp16", "fp16"),
)  # fmt: skip
EOS, PAD = 1, 0
EVEN = [[3, 4, 5, 6], [7, 8, 9, 10], [11, 3, 12, 4]]
UNEVEN = [[3], [4, 5, 6, 7, 8, 9], [10, 11, 12], [4, 5, 6, 7, 8, 9]]


def decoder(config: DecoderConfig = QWEN3, seed: int = 0, std: float = 0.2) -> Decoder:
    """A random decoder with random gains and biases; a large `std` makes sharp distributions, as training does."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config, generator, init_std=std)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    return model


def weights(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The stream a trainer sends."""
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())


def pieces(tensors: Iterable[tuple[str, Tensor]], count: int) -> Iterator[list[tuple[str, Tensor]]]:
    """`count` tensors at a time as views of one buffer, which is spoiled before the next piece."""
    held = list(tensors)
    buffer = held[0][1].new_empty(count * max(tensor.numel() for _, tensor in held))
    for first in range(0, len(held), count):
        own, at = held[first : first + count], 0
        lent: list[tuple[str, Tensor]] = []
        for name, tensor in own:
            view = buffer[at : at + tensor.numel()].view(tensor.shape)
            lent.append((name, view.copy_(tensor)))
            at += tensor.numel()
        yield lent
        buffer.fill_(math.nan)


def arrive(engine: Any, tensors: Iterable[tuple[str, Tensor]], count: int) -> int:
    """Push into vLLM in pieces. Returns the most elements that waited between two of them."""
    from harness.engines.vllm.streamed_push import Arrival

    arrival, most = Arrival(engine.weights), 0
    for piece in pieces(tensors, count):
        arrival.take(piece)
        most = max(most, sum(tensor.numel() for _, tensor in arrival.waiting))
    arrival.end()
    engine.llm.reset_prefix_cache()
    return most


def loaded(model: Decoder, plan: Plan = FP32, **options: Any) -> EmbeddedEngine:
    """An engine with the model's weights."""
    engine = EmbeddedEngine(model.config, plan, eos_id=EOS, pad_id=PAD, **options)
    engine.load_weights(weights(model))
    return engine


def sample(engine: EmbeddedEngine, prompts: list[list[int]], **options: Any) -> Rollout:
    """`generate` with defaults."""
    return engine.generate(
        prompts, **({"num_samples": 4, "max_new_tokens": 12, "temperature": 1.0, "seed": 5} | options)
    )


def trainer_logp(model: Decoder, prompts: list[list[int]], out: Rollout, temperature: float = 1.0) -> Tensor:
    """[B, T] by one full forward pass over right-padded rows, 0 where padded."""
    samples, num_tokens = len(out.lengths) // len(prompts), out.token_ids.shape[1]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    ids = torch.full((len(rows), max(map(len, rows)) + num_tokens), PAD)
    for i, prompt in enumerate(rows):
        ids[i, : len(prompt)] = torch.tensor(prompt)
        ids[i, len(prompt) : len(prompt) + num_tokens] = out.token_ids[i]
    lens = torch.tensor([len(row) for row in rows])
    with torch.no_grad():
        logits = model.head(response_hidden(model, ids, lens, num_tokens))
        logp, _ = selected_logp(logits.flatten(0, 1), out.token_ids.flatten(), temperature)
    return torch.where(torch.arange(num_tokens) < out.lengths[:, None], logp.view_as(out.logp), 0.0)


def plan_of(name: str, acts: str | None = None, **more: object) -> Plan:
    """A rollout plan by format names."""
    values = {"rollout_weights": format_named(name), "rollout_acts": format_named(acts) if acts else None} | more
    return Plan(**values)  # pyright: ignore[reportArgumentType]
