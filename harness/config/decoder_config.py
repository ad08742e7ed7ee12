"""Shape of a run's decoder, from the model's configuration or its folder's config.json."""

from __future__ import annotations

from dataclasses import replace

from harness.config.schema import SHAPE, ModelConfig
from harness.models.checkpoint import load_config
from harness.models.decoder import MIXTURE, DecoderConfig


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The shape of a model; no weights are read. Raises ValueError for one that cannot be built."""
    if model.path is not None:
        shape = load_config(model.path)
    else:
        is_qwen3, values = model.family == "qwen3", {name: getattr(model, name) for name in (*SHAPE, *MIXTURE)}
        shape = DecoderConfig(**values, rope_theta=model.rope_theta, qk_norm=is_qwen3, attention_bias=not is_qwen3)
    return shape if model.max_positions is None else replace(shape, max_positions=model.max_positions)
