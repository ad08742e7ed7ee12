"""Effective bits per weight of a plan for a model, and of a run from its record.

The rule is in `harness.numerics.effective_bits`; the weights are those of the linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from harness.api import QUANTIZED, Plan, weight_format
from harness.config.decoder_config import decoder_config
from harness.config.schema import MIXTURE, SHAPE, ModelConfig
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.effective_bits import Shape, effective_bits
from harness.numerics.formats import Adapters, format_or_none
from harness.records.run_result import RunResult


def bits_of_plan(plan: Plan, model: DecoderConfig) -> float:
    """Bits per weight of the linear layers at the rollout."""
    shapes = {
        name: cast(Shape, shape)
        for name, shape in tensor_shapes(model).items()
        if any(fnmatchcase(name, pattern) for pattern in QUANTIZED)
    }
    return effective_bits(shapes, {name: weight_format(plan, name) for name in shapes}, plan.adapters)


def bits_of_run(run: RunResult) -> float:
    """Bits per weight at the rollout; NaN where the record has no plan or no shape."""
    model: Mapping[str, Any] = run.config.get("model", {})
    if not run.planned or any(model.get(name) is None for name in SHAPE):
        return math.nan
    held: Mapping[str, Any] | None = run.planned.get("adapters")
    exceptions: Mapping[str, str | None] = run.planned.get("exceptions", {})
    plan = Plan(
        rollout_weights=format_or_none(run.planned.get("rollout_weights")),
        adapters=None if held is None else Adapters(**{**held, "targets": tuple(held["targets"])}),
        exceptions=tuple((pattern, format_or_none(name)) for pattern, name in exceptions.items()),
    )
    names = ("name", "family", *SHAPE, *(name for name in MIXTURE if name in model))
    shape = ModelConfig(**{name: model[name] for name in names})
    return bits_of_plan(plan, decoder_config(shape))
