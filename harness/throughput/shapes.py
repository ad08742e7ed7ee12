"""Qwen2.5 by size: shapes from the public config.json files, bytes of weights and cache in a precision.

Left out: activations and CUDA graphs, whose share of memory an engine measures itself.
"""

from __future__ import annotations

from math import prod

from harness.api import Plan
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.nearest import nearest
from harness.numerics.formats import FORMATS, Format, format_named


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
        rollout_acts=None if acts is None else format_named(acts),
        rollout_kv=None if kv is None else format_named(kv),
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


def plan_of(precision: str) -> Plan:
    """The plan called `precision`. Raises ValueError with the valid names."""
    if precision not in PRECISIONS:
        raise ValueError(f"precisions: {precision!r} is unknown; {nearest(precision, PRECISIONS)}")
    return PRECISIONS[precision]


_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "int8": 8, "int4": 4, "e2m1": 4}
_SCALE_BITS = {"fp32": 32, "e4m3": 8, "e8m0": 8}


def stored_bits(fmt: Format, rows: int, columns: int) -> float:
    """Bits that a [rows, columns] matrix takes in `fmt`, scales included."""
    bits = float(_BITS[fmt.element]) * rows * columns
    if fmt.tile is None:
        return bits
    tall, wide = (extent or whole for extent, whole in zip(fmt.tile, (rows, columns), strict=True))
    return bits + _SCALE_BITS[fmt.scale_dtype] * -(-rows // tall) * -(-columns // wide)


def num_parameters(config: DecoderConfig) -> int:
    """Parameters, a tied head counted once."""
    return sum(prod(shape) for shape in tensor_shapes(config).values())


def weight_bytes(config: DecoderConfig, plan: Plan) -> float:
    """Bytes of the weights in an engine: linears of the blocks in the plan's format, all else in 16 bits."""
    fmt = plan.rollout_weights or FORMATS["bf16"]
    total = 0.0
    for name, shape in tensor_shapes(config).items():
        is_linear = name.endswith("_proj.weight")
        total += (stored_bits(fmt, *shape) if is_linear else 16 * prod(shape)) / 8
    return total


def kv_bytes_per_token(config: DecoderConfig, plan: Plan) -> int:
    """Bytes of keys and values of one token over all layers."""
    element = 1 if plan.rollout_kv is not None else 2
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element
