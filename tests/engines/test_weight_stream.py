"""The reader of weight streams: scales have a place where the plan quantizes, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from harness.api import Plan
from harness.engines.weight_stream import read_stream
from tests.engines.engine_cases import plan_of

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
SHAPES = dict.fromkeys(("model.embed_tokens.weight", UP, DOWN, "lm_head.weight"), (4, 4))
KEPT = plan_of("int4_g32_asym", exceptions=(("model.layers.1.*", None),))


@pytest.mark.parametrize(
    ("plan", "name"),
    [(plan_of("bf16"), UP), (Plan(), UP), (KEPT, DOWN), (KEPT, "lm_head.weight"), (KEPT, "model.embed_tokens.weight")],
)
@pytest.mark.parametrize("kind", ["scale", "zero_point"])
def test_a_scale_of_what_is_not_quantized_is_refused(plan: Plan, name: str, kind: str) -> None:
    """Engines would leave it aside, and sample other weights than the sender meant."""
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError) as error:
        read_stream(iter({**tensors, f"{name}_{kind}": torch.ones(4, 1)}.items()), SHAPES, plan)
    assert str(error.value) == f"{name}_{kind} is in the stream, and the plan does not quantize {name}"


def test_a_zero_point_of_a_symmetric_format_is_refused() -> None:
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    given = {f"{UP}_scale": torch.ones(4, 1), f"{UP}_zero_point": torch.ones(4, 1)}
    with pytest.raises(ValueError) as error:
        read_stream(iter({**tensors, **given}.items()), SHAPES, plan_of("int8_channel"))
    assert str(error.value) == f"{UP}_zero_point is in the stream, and int8_channel has no zero point"


def test_a_scale_of_what_is_quantized_is_kept() -> None:
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    given = {f"{UP}_scale": torch.full((4, 1), 0.5), f"{UP}_zero_point": torch.full((4, 1), 7)}
    stream = read_stream(iter({**tensors, **given}.items()), SHAPES, KEPT)
    assert stream.scales == {UP: given[f"{UP}_scale"]} and stream.zeros == {UP: given[f"{UP}_zero_point"]}
    assert stream.tensors == tensors
