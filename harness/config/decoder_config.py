"""Shape of a decoder that is trained here, from the model's configuration."""

from __future__ import annotations

from harness.config.schema import ModelConfig
from harness.models.decoder import DecoderConfig


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The shape of a model trained here. Raises ValueError for one that gives none."""
    names = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    values = {name: getattr(model, name) for name in names}
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"model={model.name}: {', '.join(missing)} not given, and no model.path to read them from")
    is_qwen3 = model.family == "qwen3"
    return DecoderConfig(**values, rope_theta=model.rope_theta, qk_norm=is_qwen3, attention_bias=not is_qwen3)
