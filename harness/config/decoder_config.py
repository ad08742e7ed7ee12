"""Shape of a run's decoder, from the model's configuration or its folder's config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.config.schema import MIXTURE, SHAPE, ModelConfig
from harness.models.checkpoint import CONFIG, load_config
from harness.models.decoder import DecoderConfig


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The shape of a model; no weights are read. Raises ValueError for one that cannot be built."""
    if model.path is not None:
        shape = load_config(model.path)
    else:
        is_qwen3, values = model.family == "qwen3", {name: getattr(model, name) for name in (*SHAPE, *MIXTURE)}
        shape = DecoderConfig(**values, rope_theta=model.rope_theta, qk_norm=is_qwen3, attention_bias=not is_qwen3)
    return shape if model.max_positions is None else replace(shape, max_positions=model.max_positions)


def shape_to_check(model: ModelConfig) -> DecoderConfig | None:
    """The shape of a model that is checked before a run; None for a folder without config.json, of which a start says
    what is missing."""
    if model.path is not None and not (Path(model.path) / CONFIG).is_file():
        return None
    return decoder_config(model)
