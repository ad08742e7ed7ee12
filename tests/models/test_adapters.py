"""Adapters against y = x W^T + (alpha / r) x A^T B^T written out and merged in float64; the frozen base's codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.api import Plan
from harness.foundation.seeds import generator
from harness.models.adapters import (
    LORA,
    NORMS,
    add_adapters,
    checkpoint_name,
    freeze_base,
    named_weights,
    plain_twin,
    plain_weights,
)
from harness.models.decoder import Decoder, tensor_shapes
from harness.numerics.formats import Adapters, format_named
from harness.numerics.quantize import dequantize, quantize
from tests.engines.engine_cases import QWEN2, QWEN3, decoder

ADAPTERS = Adapters(rank=3, alpha=6.0)
IDS = torch.arange(24).view(2, 12)


def fixed_of(model: Decoder, adapters: Adapters = ADAPTERS, std: float = 0.2) -> dict[str, Tensor]:
    """Random A and B for every target."""
    fixed: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(model.config).items():
        module = name.removesuffix(".weight")
        if module.endswith(adapters.targets):
            for kind, size in (("lora_A", (adapters.rank, shape[1])), ("lora_B", (shape[0], adapters.rank))):
                noise = torch.randn(size, generator=generator("cpu", "fixed", module, kind))
                fixed[f"{module}.{kind}.weight"] = std * noise
    return fixed


def adapted(model: Decoder, adapters: Adapters = ADAPTERS, **more: Any) -> tuple[Decoder, dict[str, Tensor]]:
    """A copy with random adapters, and those."""
    fixed = fixed_of(model, adapters, **more)
    return add_adapters(copy.deepcopy(model), adapters, fixed, 0), fixed


def merged(model: Decoder, fixed: dict[str, Tensor], scale: float) -> Decoder:
    """A plain copy whose weights are W + scale B A, in float64."""
    other = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in fixed:
                a, b = (fixed[f"{module}.{kind}.weight"].double() for kind in ("lora_A", "lora_B"))
                parameter += scale * (b @ a)
    return other


@pytest.mark.parametrize("path", ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_a_layer_is_the_written_formula(path: str, config: Any) -> None:
    model = decoder(config)
    layered, fixed = adapted(model)
    name = f"model.layers.1.{path}"
    plain = model.get_submodule(name)
    x = torch.randn(5, plain.get_parameter("weight").shape[1], generator=generator("cpu", "x"))
    bias = getattr(plain, "bias", None)
    a, b = fixed[f"{name}.lora_A.weight"], fixed[f"{name}.lora_B.weight"]
    want = F.linear(x, plain.get_parameter("weight"), bias) + (6.0 / 3) * (x @ a.T) @ b.T
    found = layered.get_submodule(name)(x)
    torch.testing.assert_close(found, want, atol=2e-5, rtol=1e-5)
    assert (found - plain(x)).abs().max() > 0.05


@pytest.mark.parametrize("targets", [ADAPTERS.targets, ("q_proj", "v_proj")])
def test_the_whole_model_is_the_merged_one(targets: tuple[str, ...]) -> None:
    model, adapters = decoder(), Adapters(rank=4, alpha=2.0, targets=targets)
    layered, fixed = adapted(model, adapters)
    want = merged(model, fixed, 0.5)(IDS)
    torch.testing.assert_close(layered(IDS).double(), want, atol=2e-4, rtol=1e-4)
    reference = Decoder(model.config)
    reference.load_state_dict(dict(plain_weights(iter(named_weights(layered)), adapters)), strict=False)
    torch.testing.assert_close(reference(IDS).double(), want, atol=2e-4, rtol=1e-4)
    assert (model(IDS) - want).abs().max() > 0.05
    num_modules = sum("lora_A" in name for name, _ in layered.named_parameters())
    assert num_modules == len(targets) * model.config.num_layers


def test_names_are_the_checkpoints() -> None:
    model = decoder(QWEN2)
    layered, fixed = adapted(model)
    names = [name for name, _ in named_weights(layered)]
    assert len(names) == len(set(names)) and set(names) == set(tensor_shapes(model.config)) | set(fixed)
    for name, tensor in named_weights(layered):
        assert torch.equal(tensor, fixed[name] if name in fixed else model.get_parameter(name))
    assert checkpoint_name("a.q_proj.base_layer.bias") == "a.q_proj.bias"
    stripped = list(plain_weights(iter(named_weights(layered)), ADAPTERS))
    assert {name for name, _ in stripped} == set(tensor_shapes(model.config))


def test_a_fresh_start_is_the_base_and_a_seed() -> None:
    model, wide = decoder(), Adapters(rank=16, alpha=32.0)
    first, again, other = (dict(named_weights(add_adapters(copy.deepcopy(model), wide, {}, s))) for s in (1, 1, 2))
    a = [name for name in first if name.endswith(LORA[0])]
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and (torch.equal(tensor, other[name]) != (name in a))
        assert not name.endswith(LORA[1]) or not tensor.any()
    values = torch.cat([first[name].detach().flatten() for name in a])
    assert float(values.std() * 16) == pytest.approx(1.0, rel=0.02) and abs(float(values.mean())) * 16 < 0.02
    assert not any(first[x].shape == first[y].shape and torch.equal(first[x], first[y]) for x, y in pairwise(a))
    layered = add_adapters(copy.deepcopy(model), wide, {}, 1)
    torch.testing.assert_close(layered(IDS), model(IDS))


@pytest.mark.parametrize("train_norms", [False, True])
def test_only_adapters_are_trained(train_norms: bool) -> None:
    model = decoder(QWEN2)
    layered, _ = adapted(model, Adapters(rank=2, alpha=2.0, train_norms=train_norms))
    layered(IDS).square().mean().backward()
    trained = {checkpoint_name(name) for name, p in layered.named_parameters() if p.requires_grad}
    norms = {n for n in tensor_shapes(model.config) if n.endswith(NORMS)}
    assert len(norms) == 2 * model.config.num_layers
    assert trained == set(fixed_of(model)) | (norms if train_norms else set())
    for name, parameter in layered.named_parameters():
        assert (parameter.grad is not None) == (checkpoint_name(name) in trained)


def test_gradients_are_those_of_the_merged_weights() -> None:
    model = decoder()
    layered, fixed = adapted(model)
    layered(IDS).square().mean().backward()
    plain = merged(model, fixed, 2.0)
    plain(IDS).square().mean().backward()
    grads = {checkpoint_name(name): p.grad for name, p in layered.named_parameters()}
    for name, parameter in plain.named_parameters():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in fixed:
            continue
        assert parameter.grad is not None
        a, b = (fixed[f"{module}.{kind}.weight"].double() for kind in ("lora_A", "lora_B"))
        for kind, want in (("lora_A", 2.0 * b.T @ parameter.grad), ("lora_B", 2.0 * parameter.grad @ a.T)):
            found = grads[f"{module}.{kind}.weight"]
            assert found is not None
            torch.testing.assert_close(found.double(), want, atol=1e-3 * float(want.abs().max()), rtol=1e-2)


def test_wrong_bases_ranks_and_targets_are_refused() -> None:
    model = decoder()
    fixed = fixed_of(model)
    wrong: list[tuple[Adapters, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
        (Adapters(rank=4, alpha=6.0), dict, r"lora_A.weight is \(3, 32\), the base needs \(4, 32\)"),
        (ADAPTERS, lambda f: {n.replace("layers.2", "layers.7"): t for n, t in f.items()}, r"layers.7.*another base"),
        (ADAPTERS, lambda f: f | {n: t[:, :8] for n, t in f.items() if "q_proj.lora_A" in n}, r"is \(3, 8\)"),
        (Adapters(rank=3, alpha=6.0, targets=("q_proj",)), dict, r"down_proj.*targets other than \('q_proj',\)"),
        (Adapters(rank=3, alpha=6.0, targets=("q_proj", "w_proj")), lambda f: {}, r"w_proj"),
    ]
    for adapters, change, message in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            add_adapters(copy.deepcopy(model), adapters, change(fixed), 0)
        assert "\n" not in str(caught.value)


def test_a_twin_reads_the_same_parameters_and_has_no_adapters() -> None:
    model = decoder()
    twin = plain_twin(model)
    assert torch.equal(twin(IDS), model(IDS))
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert own is other, name
    with pytest.raises(ValueError, match="adapters"):
        plain_twin(adapted(model)[0])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4_even", "nf4", "int4_g32", "e4m3_channel"])
def test_the_frozen_base_is_quantized_from_bf16(name: str) -> None:
    model, fmt = decoder(), format_named(name)
    frozen = freeze_base(copy.deepcopy(model), Plan(rollout_weights=fmt, train_weights=fmt))
    scales = {n for n, _ in named_weights(frozen) if n.endswith("_scale")}
    assert scales == {f"{n}_scale" for n in tensor_shapes(model.config) if n.endswith("_proj.weight")}
    values = dict(named_weights(frozen))
    for at, parameter in model.named_parameters():
        if f"{at}_scale" not in scales:
            assert torch.equal(values[at], parameter)
            continue
        received = parameter.detach().to(torch.bfloat16)
        assert not torch.equal(values[at], parameter)
        if name != "nvfp4":
            assert torch.equal(values[at], dequantize(quantize(received, fmt)))
        else:  # q, k, v and gate, up share the tensor-level scale that the widest of them needs
            group = next((g for g in (("q", "k", "v"), ("gate", "up")) if at.split(".")[-2][:-5] in g), None)
            part = at.split(".")[-2]
            members = [at.replace(part, f"{m}_proj") for m in group] if group else [at]
            amax = torch.stack([model.get_parameter(m).detach().to(torch.bfloat16).abs().amax() for m in members])
            assert torch.equal(values[at], dequantize(quantize(received, fmt, tensor_amax=amax.amax().float())))


def test_a_frozen_base_under_exceptions_and_another_rollout_format() -> None:
    model, fmt = decoder(), format_named("nf4")
    kept = Plan(rollout_weights=fmt, train_weights=fmt, exceptions=(("*.layers.0.*", None), ("*.o_proj.*", None)))
    values = dict(named_weights(freeze_base(copy.deepcopy(model), kept)))
    for at, parameter in model.named_parameters():
        is_frozen = at.endswith("_proj.weight") and "o_proj" not in at and "layers.0" not in at
        assert torch.equal(values[at], parameter) != is_frozen and (f"{at}_scale" in values) == is_frozen
    other = freeze_base(copy.deepcopy(model), Plan(rollout_weights=format_named("bf16"), train_weights=fmt))
    assert not any(name.endswith("_scale") for name, _ in named_weights(other))


def test_state_dict_round_trip_over_a_frozen_base() -> None:
    fmt = format_named("int4_g32_asym")
    plan = Plan(rollout_weights=fmt, train_weights=fmt)

    def fresh(seed: int) -> Decoder:
        return add_adapters(freeze_base(decoder(), plan), ADAPTERS, {}, seed)

    one, two = fresh(1), fresh(2)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if name.endswith(".lora_B.default.weight"):
                parameter.normal_(generator=generator("cpu", "b", name))
    assert not torch.equal(one(IDS), two(IDS))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(IDS), two(IDS))
    for (name, x), (same, y) in zip(named_weights(one), named_weights(two), strict=True):
        assert name == same and torch.equal(x, y)
    assert any(name.endswith("weight_zero_point") for name, _ in named_weights(two))
