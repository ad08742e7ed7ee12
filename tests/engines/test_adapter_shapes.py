"""Shapes of adapters beside the linear layers of a small decoder, written out; refusals of targets and of streams."""

from __future__ import annotations

import pytest
import torch

from harness.engines.adapter_shapes import adapter_shapes, check_adapters
from harness.numerics.formats import Adapters

SHAPES = {
    "model.embed_tokens.weight": (96, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
}
AT = "model.layers.0."


def test_shapes_by_hand() -> None:
    both = adapter_shapes(Adapters(rank=2, alpha=2.0, targets=("q_proj", "down_proj")), SHAPES)
    assert both == {
        f"{AT}self_attn.q_proj.lora_A.weight": (2, 8), f"{AT}self_attn.q_proj.lora_B.weight": (16, 2),
        f"{AT}mlp.down_proj.lora_A.weight": (2, 24), f"{AT}mlp.down_proj.lora_B.weight": (8, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"adapters\.targets: gate is no linear layer; choose from down_proj, q_proj"):
        adapter_shapes(Adapters(rank=2, alpha=2.0, targets=("q_proj", "gate")), SHAPES)


def test_a_stream_has_each_adapter_in_its_shape() -> None:
    wanted = {"x.lora_A.weight": (2, 8), "x.lora_B.weight": (16, 2)}
    whole = {name: torch.zeros(shape) for name, shape in wanted.items()}
    check_adapters(wanted, whole)
    check_adapters({}, {})
    with pytest.raises(ValueError) as error:
        check_adapters({}, whole)
    assert str(error.value) == ("x.lora_A.weight: the plan has no adapters at the rollout; stream merged weights")
    for tensors, message in (
        ({"x.lora_A.weight": torch.zeros(2, 8)}, r"adapter x\.lora_B\.weight is missing"),
        (whole | {"y.lora_A.weight": torch.zeros(2, 8)}, r"adapter y\.lora_A\.weight is not planned"),
        (
            whole | {"x.lora_B.weight": torch.zeros(2, 16)},
            r"x\.lora_B.* has shape \(2, 16\), the plan needs \(16, 2\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_adapters(wanted, tensors)
