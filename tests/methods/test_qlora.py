"""LoRA's plan: one frozen base for both sites where it is quantized, and its own learning rate."""

from __future__ import annotations

import pytest

from harness.api import Plan
from harness.numerics.formats import format_named
from methods.qlora import LINEAR, LoRA


def test_the_base_is_shared_where_it_is_quantized() -> None:
    for name in ("nvfp4", "mxfp4_even", "nf4", "int4_g32", "int8_g128"):
        fmt = format_named(name)
        plan = LoRA().plan(Plan(rollout_weights=fmt))
        assert plan.train_weights == fmt and plan.adapters is not None
        assert (plan.adapters.rank, plan.adapters.alpha, plan.adapters.site) == (32, 32.0, "both")
        assert plan.adapters.targets == LINEAR and plan.adapters.is_trained and not plan.adapters.train_norms
    bf16 = format_named("bf16")
    assert LoRA().plan(Plan(rollout_weights=bf16, rollout_acts=bf16)).train_weights is None
    for weights, acts in (("int8_channel", "int8_token"), ("nvfp4", "nvfp4_act_token"), ("e4m3_block", "e4m3_1x128")):
        with pytest.raises(ValueError, match=rf"quantizes activations to {acts}.*weight-only precision: nvfp4"):
            LoRA().plan(Plan(rollout_weights=format_named(weights), rollout_acts=format_named(acts)))
    with pytest.raises(ValueError, match="nf4_dq"):
        LoRA().plan(Plan(rollout_weights=format_named("nf4_dq")))


def test_learning_rates() -> None:
    at = "model.layers.0."
    names = (f"{at}mlp.up_proj.lora_A.weight", f"{at}mlp.up_proj.lora_B.weight", f"{at}input_layernorm.weight")
    assert [LoRA().lr_factor(name) for name in names] == [10.0, 10.0, 1.0]
    assert [LoRA(train_norms=True, lr_scale=3.0).lr_factor(name) for name in names] == [3.0, 3.0, 3.0]
    assert LoRA(train_norms=True).lr_factor("model.norm.weight") == 1.0


def test_knobs() -> None:
    for bad, message in (
        ({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"lr_scale": -1.0}, "lr_scale"), ({"targets": ()}, "none"),
        ({"targets": ("q_proj", "head")}, "head; choose from q_proj"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"LoRA.*{message}"):
            LoRA(**bad)  # type: ignore[arg-type]
