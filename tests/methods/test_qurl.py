"""QuRL: the adaptive clip range against golden numbers, what the rescaling does to gradients and codes, its control."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Fixed, Plan, Site, weight_format
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import format_named
from harness.numerics.invariant_scaling import Scope, scaled
from harness.numerics.quantize import code_flips, quantize
from methods.flashrl import TIS, log_rho
from methods.qurl import ACR, METHOD, QURL_ACR, QURL_LR, UAQ, UAQLearningRate, adaptive_clip
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

CONFIG = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128
)
READERS = {"qkv": ("q", "k", "v"), "all": ("q", "k", "v", "gate", "up")}
"""Scope -> the linear layers whose weights are divided."""
SCOPES: tuple[Scope, ...] = ("qkv", "all")
LOOSE = Algo(eps_low=0.05, eps_high=0.05)
"""A band that random ratios leave often."""


@pytest.mark.parametrize(("eps_high", "bound", "loss"), [(0.2, 1.992070, -0.326914), (0.28, 2.124875, -0.336738)])
def test_golden_clip_range(eps_high: float, bound: float, loss: float) -> None:
    batch, logp, algo = golden_batch(), golden_logp(), Algo(eps_high=eps_high)
    c = corrected([ACR(cap=2.0)], batch, algo)
    expected = torch.full((3, 4), 1 + eps_high, dtype=torch.float64)
    expected[0, 2] = bound
    assert_published(c.clip_high, expected)
    assert_published(value_and_gradient(logp, batch, c, algo)[0].item(), loss)
    assert_exact(c.weight, corrected([TIS(cap=2.0)], batch, algo).weight)
    assert (c.clip_low == 0.8).all()


def test_it_is_tis_where_nothing_is_truncated_or_nothing_clips() -> None:
    logp, batch = random_batch("same as TIS", spread=0.8)
    huge = float(log_rho(batch.old_logp, batch.rollout_logp, batch.mask, "token").max().exp()) * 1.01
    punished = replace(batch, adv=-batch.adv.abs())
    for cap, b, at in ((huge, batch, logp), (1.1, punished, logp), (1.1, batch, batch.old_logp.clone())):
        current = at.detach().requires_grad_()
        tis = value_and_gradient(current, b, corrected([TIS(cap=cap)], b, LOOSE), LOOSE)
        acr = value_and_gradient(current, b, corrected([ACR(cap=cap)], b, LOOSE), LOOSE)
        assert_exact(acr[0], tis[0])
        assert_exact(acr[1], tis[1])
    tis = value_and_gradient(logp, batch, corrected([TIS(cap=1.1)], batch, LOOSE), LOOSE)
    acr = value_and_gradient(logp, batch, corrected([ACR(cap=1.1)], batch, LOOSE), LOOSE)
    assert (tis[1] != acr[1]).any() and acr[0] < tis[0]


def test_bound_is_monotone_and_reaches_the_untruncated_term() -> None:
    log_ratio = torch.linspace(-3, 12, 400, dtype=torch.float64)[None]
    clip = torch.full_like(log_ratio, 1.2)
    u = adaptive_clip(clip, log_ratio, 2.0)
    assert (u >= clip).all() and (u.diff() >= 0).all() and u.max() > 1e4
    rho = log_ratio.exp()
    above = rho > 2.0
    assert_exact((rho.clamp(max=2.0) * u)[above], (1.2 * rho)[above])
    guarded = adaptive_clip(clip, log_ratio, 2.0, u_max=3.0)
    assert guarded.max() == 3.0 and torch.equal(guarded, u.clamp(max=3.0))
    assert torch.equal(adaptive_clip(clip, log_ratio, 2.0, u_max=1.0), clip)


def test_positive_tokens_get_at_least_as_much_as_under_tis() -> None:
    logp, batch = random_batch("more", spread=1.0)
    batch = replace(batch, adv=batch.adv.abs())
    for cap in (1.0, 1.5, 3.0):
        tis, _ = value_and_gradient(logp, batch, corrected([TIS(cap=cap)], batch, LOOSE), LOOSE)
        acr, _ = value_and_gradient(logp, batch, corrected([ACR(cap=cap)], batch, LOOSE), LOOSE)
        assert acr <= tis


def test_sequence_level_padding_and_bad_knobs() -> None:
    _, batch = random_batch("sequence", spread=0.5)
    rho = log_rho(batch.old_logp, batch.rollout_logp, batch.mask, "sequence").exp()
    c = corrected([ACR(cap=1.2, level="sequence")], batch)
    assert_exact(c.clip_high, 1.2 * (rho / 1.2).clamp(min=1))
    rollout = torch.where(batch.mask, batch.rollout_logp, nan)
    rollout[0, 0], rollout[0, 1] = -1000.0, nan
    spoilt = corrected([ACR(cap=inf)], replace(batch, rollout_logp=rollout))
    assert torch.isfinite(spoilt.clip_high).all() and torch.isfinite(spoilt.weight).all()
    with pytest.raises(ValueError, match=r"ACR.u_max: 0.5 is below 1"):
        ACR(u_max=0.5)
    with pytest.raises(ValueError, match=r"TIS.cap|ACR.cap"):
        ACR(cap=0)
    for part in (UAQ, UAQLearningRate):
        with pytest.raises(ValueError, match=rf"{part.__name__}.s: 0.0"):
            part(s=0.0)


def decoder() -> Decoder:
    """A small model with gains that are not 1."""
    model = Decoder(CONFIG, generator("cpu", "qurl"), init_std=0.1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator("cpu", "qurl", name)))
    return model


def site_of(build: Callable[[Path], nn.Module], fixed: Fixed | None = None) -> Site:
    """The site of `prepare`, without what it should not touch."""
    values: dict[str, Any] = dict.fromkeys(f.name for f in fields(Site))
    return Site(**values | {"checkpoint": Path("unused"), "build": build, "fixed": fixed or {}})


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["int8_channel", "e4m3_channel", "e4m3_block", "nvfp4"])
def test_prepared_model_is_the_same_function_with_the_same_codes(name: str, scope: Scope) -> None:
    plan, ids = Plan(rollout_weights=format_named(name)), torch.arange(20).view(2, 10)
    original = decoder()
    model, fixed = UAQ(tensors=scope).prepare(site_of(lambda _: decoder()), plan)
    assert isinstance(model, Decoder) and fixed == {}
    with torch.no_grad():
        before, after = original(ids), model(ids)
    assert float((after - before).norm() / before.norm()) < 1e-6
    flips, total, changed = 0.0, 0, 0
    for (at, old), new in zip(original.named_parameters(), model.parameters(), strict=True):
        assert new.dtype == torch.float32 and new.requires_grad
        changed += not torch.equal(old, new)
        fmt = weight_format(plan, at)
        if fmt is not None:
            flips += float(code_flips(quantize(old.detach(), fmt), quantize(new.detach(), fmt))) * old.numel()
            total += old.numel()
    assert flips / total <= 2e-3 and changed == CONFIG.num_layers * {"qkv": 4, "all": 7}[scope]


def test_frozen_scales_and_adapters_of_earlier_parts_follow() -> None:
    at = "model.layers.0.self_attn."
    weight = dict(decoder().named_parameters())[f"{at}q_proj.weight"].detach()
    fixed = {
        f"{at}q_proj.weight_scale": weight.abs().amax(1, keepdim=True) / 127,
        f"{at}q_proj.lora_A.weight": torch.ones(2, 64),
        f"{at}q_proj.lora_B.weight": torch.ones(64, 2),
        f"{at}o_proj.lora_B.weight": torch.ones(64, 2),
        f"{at}k_scale": torch.ones(()),
    }
    _, changed = UAQ().prepare(site_of(lambda _: decoder(), fixed), Plan())
    assert set(changed) == {f"{at}q_proj.weight_scale", f"{at}q_proj.lora_B.weight"}
    for name, tensor in changed.items():
        assert torch.equal(tensor, fixed[name] / 1.5)


def test_power_of_two_scales_want_a_power_of_two() -> None:
    for name in ("mxfp8", "mxfp4", "e4m3_block_ue8m0", "e4m3_1x128_ue8m0"):
        fmt = format_named(name)
        for plan in (Plan(rollout_weights=fmt), Plan(rollout_acts=fmt), Plan(exceptions=(("*.q_proj.weight", fmt),))):
            with pytest.raises(ValueError, match=rf"UAQ.s: 1.5 with {fmt.name}.*choose a power of two"):
                UAQ().plan(plan)
            with pytest.raises(ValueError, match=r"UAQ.s: 1.5"):
                UAQ().prepare(site_of(lambda _: decoder()), plan)
            assert UAQ(s=2.0).plan(plan) == Plan()
    assert UAQ().plan(Plan(rollout_weights=format_named("nvfp4"))) == Plan()


def test_golden_rescaling() -> None:
    """W (g n) = (W / s)(s g n)."""
    w, gain = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 2.0])
    at = "model.layers.0."
    names = {f"{at}self_attn.q_proj.weight": w, f"{at}input_layernorm.weight": gain}
    found = scaled({**names, f"{at}post_attention_layernorm.weight": gain}, 1.5, "qkv")
    n = torch.tensor([1.0, -1.0])
    new_w, new_gain = (found[name] for name in names)
    torch.testing.assert_close(new_w @ (new_gain * n), torch.tensor([-3.5, -6.5]))
    torch.testing.assert_close(w @ (gain * n), torch.tensor([-3.5, -6.5]))
    torch.testing.assert_close(new_w, w / 1.5)
    torch.testing.assert_close(new_gain, gain * 1.5)


def loss_of(model: Decoder, ids: Tensor) -> Tensor:
    """Next-token cross entropy."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def rescaled(model: Decoder, s: float, scope: Scope) -> Decoder:
    """The transform on a copy."""
    other = copy.deepcopy(model)
    other.load_state_dict(scaled(dict(model.state_dict()), s, scope), strict=True)
    return other


@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_grow_by_s_and_shrink_by_s(scope: Scope) -> None:
    ids = torch.randint(32, (4, 12), generator=generator("cpu", "ids"))
    one = decoder().double()
    two = rescaled(one, 1.5, scope)
    readers = tuple(f"{module}_proj.weight" for module in READERS[scope])
    norms = ("input_layernorm.weight",) if scope == "qkv" else ("layernorm.weight",)
    for model in (one, two):
        loss_of(model, ids).backward()
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        factor = UAQLearningRate(tensors=scope).lr_factor(name)
        assert factor == (1.5 if name.endswith(readers) else 1 / 1.5 if name.endswith(norms) else 1.0)
        torch.testing.assert_close(q.grad, factor * p.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "expected"), [("adam", 1.5), ("sgd", 2.25)])
@pytest.mark.parametrize(("name", "near"), [("int8_channel", 0.05), ("e4m3_channel", 0.1)])
def test_codes_flip_s_times_under_adam_and_s_squared_under_sgd(
    name: str, near: float, kind: str, expected: float
) -> None:
    """Less in E4M3, where the bins of the smallest values are no wider than a step."""
    fmt = format_named(name)
    w = 0.02 * torch.randn(1024, 1024, generator=generator("cpu", "flips"))
    grad = torch.randn(1024, 1024, generator=generator("cpu", "flip gradient"))
    step = 4e-7 * (grad.sign() if kind == "adam" else grad)
    gain = 1.0 if kind == "adam" else 1.5
    plain = float(code_flips(quantize(w, fmt), quantize(w + step, fmt)))
    wide = float(code_flips(quantize(w / 1.5, fmt), quantize(w / 1.5 + gain * step, fmt)))
    assert plain > 4e-4 and wide / plain == pytest.approx(expected, rel=near)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_control_takes_the_same_steps_under_adam(scope: Scope) -> None:
    ids = torch.randint(32, (4, 12), generator=generator("cpu", "ids"))
    start = decoder().double()

    def trained(model: Decoder, factor: Callable[[str], float]) -> Tensor:
        groups = [{"params": [p], "lr": 1e-2 * factor(name)} for name, p in model.named_parameters()]
        optimizer = torch.optim.Adam(groups, eps=1e-30)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
        return model(ids).detach()

    target = trained(rescaled(start, 1.5, scope), lambda _: 1.0)
    control = trained(copy.deepcopy(start), UAQLearningRate(tensors=scope).lr_factor)
    without = trained(copy.deepcopy(start), lambda _: 1.0)
    other_scope = trained(copy.deepcopy(start), UAQLearningRate(tensors="all" if scope == "qkv" else "qkv").lr_factor)
    torch.testing.assert_close(control, target, rtol=1e-4, atol=1e-4)
    for other in (without, other_scope):
        assert (other - target).abs().max() > 0.02


def test_methods() -> None:
    assert [type(p) for p in QURL_LR.parts] == [UAQLearningRate, ACR] and not any("mx" in p for p in METHOD.precisions)
    assert QURL_LR.parts[0] == UAQLearningRate(s=1.5, tensors="qkv")
    assert "bf16" in QURL_ACR.precisions and ACR.needs_updates == 2 and QURL_LR.is_control
    assert UAQLearningRate().lr_factor("lm_head.weight") == UAQLearningRate().lr_factor("model.norm.weight") == 1.0
