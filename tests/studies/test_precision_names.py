"""Precisions that studies name are those of the configuration, but for the few that say so here."""

from __future__ import annotations

import pytest

from harness.config.load import load
from harness.config.resolve import rollout_plan
from harness.numerics.formats import format_named, format_or_none
from harness.studies.parity.record import FORMATS
from harness.studies.throughput.shapes import PRECISIONS

CHECKPOINT = {"int4": "int4_g128"}
"""As published checkpoints have it; small models are too narrow."""
PUBLISHED = {"mxfp4": ("mxfp4", None), "nvfp4_w4a4": ("nvfp4", "nvfp4_act")}
"""Weights and activations by the rules of compressed-tensors, which vLLM's checkpoints have."""


@pytest.mark.parametrize("name", sorted({*FORMATS, *PRECISIONS}))
def test_a_studys_precision_is_that_of_its_configuration(name: str) -> None:
    configured = load(["method=naive", "model=xs", "task=chain", f"precision={name}"]).precision
    if name in PRECISIONS:
        plan, expected = PRECISIONS[name], rollout_plan(configured)
        weights = format_named(CHECKPOINT[name]) if name in CHECKPOINT else expected.rollout_weights
        assert (plan.rollout_weights, plan.rollout_acts, plan.rollout_kv) == (
            weights, expected.rollout_acts, expected.rollout_kv
        )  # fmt: skip
    if name in FORMATS:
        weights, acts = PUBLISHED.get(name, (configured.weights, configured.acts))
        assert [format_or_none(part) for part in FORMATS[name]] == [
            format_or_none(part) for part in (weights, acts, configured.kv)
        ]
