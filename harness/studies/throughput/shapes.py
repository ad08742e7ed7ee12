"""Qwen2.5 by size: shapes from the public config.json files, and the plans of precisions.

Left out: bytes of weights and cache (`harness.engines.vllm.memory`).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.api import Plan
from harness.engines.vllm.memory import num_parameters
from harness.foundation.did_you_mean import nearest
from harness.models.decoder import DecoderConfig
from harness.numerics.formats import format_named, format_or_none


def _qwen(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, *, vocab: int = 151936, eps: float = 1e-6
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        rope_theta=1e6,
        rms_eps=eps,
        qk_norm=False,
        attention_bias=True,
        tie_embeddings=vocab == 151936 and hidden < 3000,
        max_positions=32768,
        bos_id=151643,
        eos_id=151643,
    )


SIZES: dict[str, DecoderConfig] = {
    "0.5b": _qwen(24, 896, 14, 2, 4864),
    "1.5b": _qwen(28, 1536, 12, 2, 8960),
    "3b": _qwen(36, 2048, 16, 2, 11008),
    "7b": _qwen(28, 3584, 28, 4, 18944, vocab=152064),
    "14b": _qwen(48, 5120, 40, 8, 13824, vocab=152064, eps=1e-5),
    "32b": _qwen(64, 5120, 40, 8, 27648, vocab=152064, eps=1e-5),
    "toy": _qwen(2, 256, 4, 2, 512, vocab=1024),
}
"""Name -> shape: Qwen/Qwen2.5-{0.5B, ..., 32B} config.json; up to 3B the head is the embedding. "toy" is for CPU."""


def _plan(weights: str, acts: str | None = None, kv: str | None = None) -> Plan:
    return Plan(
        rollout_weights=format_named(weights),
        rollout_acts=format_or_none(acts),
        rollout_kv=format_or_none(kv),
    )


PRECISIONS: dict[str, Plan] = {
    "bf16": _plan("bf16", "bf16"),
    "fp16": _plan("fp16", "fp16"),
    "fp8_tensor": _plan("e4m3_tensor", "e4m3_token"),
    "fp8_channel": _plan("e4m3_channel", "e4m3_token"),
    "fp8_block": _plan("e4m3_block", "e4m3_1x128"),
    "int8": _plan("int8_channel", "int8_token"),
    "w8a16": _plan("int8_g128"),
    "int4": _plan("int4_g128"),
    "nvfp4": _plan("nvfp4"),
    "bf16+kv8": _plan("bf16", "bf16", "e4m3_kv"),
    "fp8_block+kv8": _plan("e4m3_block", "e4m3_1x128", "e4m3_kv"),
    "int8+kv8": _plan("int8_channel", "int8_token", "e4m3_kv"),
}
"""Name -> plan of the rollouts. Names are those of conf/precision; INT4 has groups of 128, as checkpoints have."""


def shape_of(size: str) -> DecoderConfig:
    """The shape called `size`. Raises ValueError with the valid names."""
    if size not in SIZES:
        raise ValueError(f"sizes: {size!r} is unknown; {nearest(size, SIZES)}")
    return SIZES[size]


def in_order(sizes: Iterable[str]) -> list[str]:
    """Sizes by their number of parameters."""
    return sorted(sizes, key=lambda size: num_parameters(shape_of(size)))


def plan_of(precision: str) -> Plan:
    """The plan called `precision`. Raises ValueError with the valid names."""
    if precision not in PRECISIONS:
        raise ValueError(f"precisions: {precision!r} is unknown; {nearest(precision, PRECISIONS)}")
    return PRECISIONS[precision]
