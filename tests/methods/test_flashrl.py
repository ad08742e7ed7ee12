"""FlashRL: truncated importance sampling against golden numbers, and the frozen INT8 profile."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from harness.api import Plan, Sequences, Step
from harness.foundation.seeds import generator
from harness.numerics.formats import format_named
from harness.numerics.quantize import dequantize, quantize
from harness.objective.loss import batch_normalize
from harness.objective.mismatch import correction_metrics
from methods.flashrl import TIS, Profile, log_rho, saturated
from tests.loss_cases import (
    Algo,
    assert_exact,
    assert_published,
    corrected,
    golden_batch,
    golden_logp,
    random_batch,
    value_and_gradient,
)
from tests.toy import site_of

BATCH = golden_batch()
SEQS = Sequences(ids=BATCH.token_ids, prompt_lens=1, token_ids=BATCH.token_ids, sampled=BATCH.mask)
STEP = Step(index=0, total=3, seed=0)
INT8 = Plan(rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"))


def rows(*values: list[float]) -> Tensor:
    """A float64 matrix."""
    return torch.tensor(values, dtype=torch.float64)


def test_golden_token_weights() -> None:
    batch, logp = golden_batch(), golden_logp()
    c = corrected([TIS(cap=2.0)], batch)
    published = rows([1, 1.105171, 2, 0.740818], [1.051271, 0.406570, 1.221403, 1], [0.980199, 1.020201, 1, 1])
    assert_published(c.weight, published)
    loss, grad = value_and_gradient(logp, batch, c, Algo())
    assert_published(loss.item(), -0.308242)
    expected = rows([-0.11111, 0, 0, -0.06098], [0.12909, 0, 0.22375, 0], [-0.05556, -0.05556, 0, 0])
    torch.testing.assert_close(grad, expected, rtol=0, atol=5e-6)
    assert_published(c.weight[batch.mask].mean().item(), 1.058404)
    normal = replace(c, weight=batch_normalize(c.weight, batch.mask, "token"))
    assert_published(value_and_gradient(logp, batch, normal, Algo())[0].item(), -0.291233)


def test_golden_sequence_weights() -> None:
    batch, logp = golden_batch(), golden_logp()
    c = corrected([TIS(cap=2.0, level="sequence")], batch)
    assert_published(c.weight[:, 0], torch.tensor([2, 0.522046, 1], dtype=torch.float64))
    assert_published(value_and_gradient(logp, batch, c, Algo())[0].item(), -0.825171)
    assert_published(correction_metrics(c, batch.mask)["correction/ess"], 0.789896)
    normal = replace(c, weight=batch_normalize(c.weight, batch.mask, "sequence"))
    assert_published(value_and_gradient(logp, batch, normal, Algo())[0].item(), -0.702863)
    ratios = log_rho(batch.old_logp, batch.rollout_logp, batch.mask, "sequence").exp()
    assert_published(ratios[:, 0], torch.tensor([2.718282, 0.522046, 1], dtype=torch.float64))
    ratios = log_rho(batch.old_logp, batch.rollout_logp, batch.mask, "geometric").exp()
    assert_published(ratios[:, 0], torch.tensor([1.284025, 0.805198, 1], dtype=torch.float64))


@pytest.mark.parametrize(("level", "value"), [("token", 0.482864), ("sequence", 0.554047)])
def test_golden_bypass_policy_gradient(level: Literal["token", "sequence"], value: float) -> None:
    """The weight is that of the current policy against the sampler, as a constant."""
    logp = golden_logp()
    batch = replace(golden_batch(), old_logp=logp.detach())
    c = corrected([TIS(level=level)], batch)
    loss, grad = value_and_gradient(logp, batch, c, Algo(mode="bypass_pg"))
    assert_published(loss.item(), value)
    if level == "token":
        published = rows(
            [-0.11111, -0.16576, -0.22222, -0.06098], [0.12909, 0.03028, 0.22222, 0], [-0.05556, -0.05556, 0, 0]
        )
        torch.testing.assert_close(grad, published, rtol=0, atol=5e-6)


def test_one_update_decoupled_and_bypass_policy_gradient_have_one_gradient() -> None:
    logp, batch = random_batch("one update")
    batch = replace(batch, old_logp=logp.detach())
    c = corrected([TIS(cap=1.3)], batch)
    value, grad = value_and_gradient(logp, batch, c, Algo())
    other, same = value_and_gradient(logp, batch, c, Algo(mode="bypass_pg"))
    assert_exact(same, grad)
    assert (value - other).abs() > 1e-3
    expected = torch.where(batch.mask, -c.weight * batch.adv, 0.0) / batch.mask.sum()
    assert_exact(grad, expected)


def test_extreme_and_invalid_log_probs() -> None:
    _, batch = random_batch("extreme")
    rollout = torch.where(batch.mask, batch.rollout_logp, nan)
    rollout[0, 0], rollout[0, 1] = -1000.0, nan
    spoilt = replace(batch, rollout_logp=rollout)
    for level in ("token", "sequence"):
        weight = corrected([TIS(cap=inf, level=level)], spoilt).weight
        assert torch.isfinite(weight).all() and weight[0, 0] == torch.tensor(20.0, dtype=torch.float64).exp()
    with pytest.raises(ValueError, match=r"TIS.cap: 0"):
        TIS(cap=0)


class TwoLayers(nn.Module):
    """Checkpoint names of two quantized layers and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        rng = generator("cpu", "profile")

        def layer(rows: int, columns: int) -> nn.Linear:
            linear = nn.Linear(columns, rows, bias=False)
            linear.weight.data = torch.randn(rows, columns, generator=rng)
            return linear

        self.q_proj, self.o_proj, self.lm_head = layer(8, 16), layer(16, 8), layer(4, 16)


def profiled(plan: Plan) -> tuple[TwoLayers, dict[str, Tensor]]:
    """A model in a layer-like prefix, and the scales that `prepare` leaves."""
    model = TwoLayers()
    checkpoint, fixed = Profile().prepare(site_of(nn.ModuleDict({"layer": model})), plan)
    assert checkpoint is None
    return model, fixed


def stream(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights as a trainer names them."""
    return [(f"layer.{name}", tensor.detach()) for name, tensor in model.named_parameters()]


def test_profile_freezes_the_initial_scales() -> None:
    model, fixed = profiled(INT8)
    assert set(fixed) == {"layer.q_proj.weight_scale", "layer.o_proj.weight_scale"}
    fmt, memory = format_named("int8_channel"), dict[str, float]()
    first = list(Profile().sync(iter(stream(model)), STEP, INT8, fixed, memory))
    assert [name for name, _ in first] == [
        "layer.q_proj.weight_scale", "layer.q_proj.weight", "layer.o_proj.weight_scale", "layer.o_proj.weight",
        "layer.lm_head.weight",
    ]  # fmt: skip
    assert memory["profile_saturated_frac"] == 0.0
    pushed = dict(first)
    for name in ("layer.q_proj.weight", "layer.o_proj.weight"):
        frozen = quantize(pushed[name], fmt, scale=pushed[f"{name}_scale"])
        assert torch.equal(frozen.codes, quantize(pushed[name], fmt).codes)
    model.q_proj.weight.data *= 2.0
    later = dict(Profile().sync(iter(stream(model)), STEP, INT8, fixed, memory))
    assert torch.equal(later["layer.q_proj.weight_scale"], fixed["layer.q_proj.weight_scale"])
    frozen = quantize(later["layer.q_proj.weight"], fmt, scale=later["layer.q_proj.weight_scale"])
    assert dequantize(frozen).abs().max() < 0.6 * later["layer.q_proj.weight"].abs().max()
    beyond = saturated(later["layer.q_proj.weight"], later["layer.q_proj.weight_scale"])
    assert 0 < int(beyond) == round(memory["profile_saturated_frac"] * 256)


def test_profile_refits_only_above_its_threshold() -> None:
    model, fixed = profiled(INT8)
    tree, memory = nn.ModuleDict({"layer": model}), dict[str, float]()
    model.o_proj.weight.data *= 3.0
    list(Profile().sync(iter(stream(model)), STEP, INT8, fixed, memory))
    assert Profile().refit(tree, SEQS, BATCH, STEP, INT8, fixed, memory) is None
    assert Profile(refit_above=0.9).refit(tree, SEQS, BATCH, STEP, INT8, fixed, memory) is None
    again = Profile(refit_above=1e-4).refit(tree, SEQS, BATCH, STEP, INT8, fixed, memory)
    assert again is not None and memory["profile_refits"] == 1.0
    torch.testing.assert_close(again["layer.o_proj.weight_scale"], 3.0 * fixed["layer.o_proj.weight_scale"])
    list(Profile().sync(iter(stream(model)), STEP, INT8, again, memory))
    assert memory["profile_saturated_frac"] == 0.0


@pytest.mark.parametrize("name", ["e4m3_channel", "e4m3_block", "int4_g32", "int8_g128", "nvfp4", "bf16"])
def test_other_formats_pass_unchanged(name: str) -> None:
    plan, memory = Plan(rollout_weights=format_named(name)), dict[str, float]()
    model, fixed = profiled(plan)
    assert fixed == {}
    passed = list(Profile().sync(iter(stream(model)), STEP, plan, fixed, memory))
    assert [n for n, _ in passed] == [n for n, _ in stream(model)] and memory == {}


def test_an_exception_of_the_plan_is_followed() -> None:
    plan = replace(INT8, exceptions=(("*.o_proj.weight", None),))
    assert set(profiled(plan)[1]) == {"layer.q_proj.weight_scale"}


def test_layers_may_stay_in_high_precision() -> None:
    part = Profile(keep_high=("model.layers.0.*",))
    assert part.plan(INT8) == Plan(exceptions=(("model.layers.0.*", None),)) and Profile().plan(INT8) == Plan()
