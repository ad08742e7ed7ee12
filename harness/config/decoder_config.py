"""Shape of a decoder that is trained here, from the model's configuration."""

from __future__ import annotations

from harness.config.schema import SHAPE, ModelConfig
from harness.models.decoder import DecoderConfig


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The shape of a model without a path. Raises ValueError for one that cannot be built."""
    is_qwen3, values = model.family == "qwen3", {name: getattr(model, name) for name in SHAPE}
    return DecoderConfig(**values, rope_theta=model.rope_theta, qk_norm=is_qwen3, attention_bias=not is_qwen3)
