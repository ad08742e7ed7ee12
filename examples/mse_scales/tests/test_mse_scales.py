"""Scales by brute force, never a larger error than rounding to nearest, and what is sent."""

from __future__ import annotations

import pytest
import torch
from lowbit_mse_scales import METHOD, MSEScales, mse_scale

from harness.api import Plan, Step
from harness.numerics.formats import format_named
from harness.numerics.quantize import fake_quantize, quantize
from methods import METHODS

FACTORS = (1.0, 0.9, 0.8)


@pytest.mark.parametrize("name", ["int4_g32", "int8_channel"])
def test_every_group_has_the_factor_of_least_error(name: str) -> None:
    fmt = format_named(name)
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    plain, ours = quantize(w, fmt).scale, mse_scale(w, fmt, FACTORS)
    assert plain is not None and ours.shape == plain.shape
    size = 64 // plain.shape[1]
    for row in range(6):
        for group in range(plain.shape[1]):
            columns = slice(group * size, (group + 1) * size)
            errors = [float((w - fake_quantize(w, fmt, scale=plain * f)).square()[row, columns].sum()) for f in FACTORS]
            assert float(ours[row, group] / plain[row, group]) == pytest.approx(FACTORS[errors.index(min(errors))])


def test_the_scale_precedes_its_weight_and_other_tensors_pass() -> None:
    plan = Plan(rollout_weights=format_named("int4_g32"))
    name = "model.layers.0.mlp.up_proj.weight"
    w, norm = torch.randn(4, 64), torch.ones(64)
    step = Step(index=0, total=1, seed=0)
    sent = list(MSEScales().sync(iter([(name, w), ("model.norm.weight", norm)]), step, plan, {}, {}))
    assert [key for key, _ in sent] == [f"{name}_scale", name, "model.norm.weight"]
    assert sent[1][1] is w and sent[2][1] is norm


def test_it_is_registered_by_its_entry_point_and_checks_its_factors() -> None:
    assert METHODS["mse_scales"] == METHOD
    with pytest.raises(ValueError, match=r"MSEScales\.factors: \(1\.5,\)"):
        MSEScales(factors=(1.5,))
