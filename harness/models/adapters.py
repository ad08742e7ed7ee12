"""Trained low-rank adapters on a decoder, through peft, and the frozen base under them.

    y = x W^T + (alpha / rank) (x A^T) B^T        W frozen, in a number format where the plan names one

Parameters are streamed under checkpoint names: peft's "base_layer" and "default" are taken out of them. A frozen layer
keeps the scales it was quantized with as buffers `weight_scale` and `weight_zero_point`; they travel with the weights,
so that an engine arrives at the same codes. Left out: dropout and biases of adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.api import LINEAR, Plan, WeightStream, fused, weight_format
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder
from harness.numerics.formats import Adapters
from harness.numerics.quantize import dequantize, merged_amax, quantize, receiver_scale

COMPANIONS = (".weight_scale", ".weight_zero_point")
"""Endings of what travels beside a weight."""
LORA = (".lora_A.weight", ".lora_B.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a module's parameter."""
    return (
        name.replace(".base_layer.", ".")
        .replace(".lora_A.default.", ".lora_A.")
        .replace(".lora_B.default.", ".lora_B.")
    )


def add_adapters(model: Decoder, adapters: Adapters, fixed: Mapping[str, Tensor], seed: int) -> Decoder:
    """Put adapters on the target layers, in place, and freeze everything else.

    A ~ N(0, 1 / rank^2) and B = 0 (peft's "gaussian"), or the tensors of `fixed` called "<module>.lora_A.weight" [r, K]
    and "<module>.lora_B.weight" [N, r]. Raises ValueError where those are of another rank or another base, and for a
    target that is no linear layer of a block.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = {name for group in LINEAR for name in group}
    if unknown := sorted(set(adapters.targets) - layers):
        raise ValueError(f"adapters.targets: {unknown[0]} is no linear layer; choose from {', '.join(sorted(layers))}")
    alpha: Any = adapters.alpha  # peft asks for an int, and divides it
    config = LoraConfig(
        r=adapters.rank, lora_alpha=alpha, target_modules=[*adapters.targets], lora_dropout=0.0, bias="none",
        init_lora_weights=False,
    )  # fmt: skip
    inject_adapter_in_model(config, model)
    known = {name for name in fixed if name.endswith(LORA)}
    for name, parameter in model.named_parameters():
        own = checkpoint_name(name)
        is_adapter = own.endswith(LORA)
        parameter.requires_grad_(is_adapter or (adapters.train_norms and own.endswith(NORMS)))
        if is_adapter:
            _initialise(parameter, own, adapters.rank, fixed, seed)
            known.discard(own)
    if known:
        raise ValueError(f"adapters: {min(known)} belongs to another base or to targets other than {adapters.targets}")
    return model


@torch.no_grad()
def _initialise(parameter: nn.Parameter, name: str, rank: int, fixed: Mapping[str, Tensor], seed: int) -> None:
    given = fixed.get(name)
    if given is not None:
        if given.shape != parameter.shape:
            raise ValueError(f"adapters: {name} is {tuple(given.shape)}, the base needs {tuple(parameter.shape)}")
        parameter.copy_(given)
    elif name.endswith(LORA[0]):
        noise = torch.randn(parameter.shape, generator=generator("cpu", seed, "adapter", name))
        parameter.copy_(noise / rank)
    else:
        parameter.zero_()


@torch.no_grad()
def freeze_base(model: Decoder, plan: Plan) -> Decoder:
    """Replace every linear weight that `plan.train_weights` covers by its quantized values, in place.

    What is quantized is the bf16 tensor, as an engine receives it; merged layers share a tensor-level scale. Where the
    rollout has the same format, the layers keep their scales as buffers.
    """
    fmt = plan.train_weights
    assert fmt is not None and fmt.tile is not None
    held = Plan(rollout_weights=fmt, exceptions=plan.exceptions)
    modules = model.model.named_modules(prefix="model")
    for names in fused(name for name, module in modules if isinstance(module, nn.Linear)):
        layers = [model.get_submodule(name) for name in names if weight_format(held, f"{name}.weight") == fmt]
        if not layers:
            continue
        weights = [layer.get_parameter("weight") for layer in layers]
        received = [weight.to(torch.bfloat16) for weight in weights]
        amax = merged_amax(received, fmt)
        for layer, weight, w in zip(layers, weights, received, strict=True):
            q = quantize(w, fmt, tensor_amax=amax)
            weight.copy_(dequantize(q))
            if plan.rollout_weights == fmt:
                layer.register_buffer("weight_scale", receiver_scale(q))
                if q.zero_point is not None and not fmt.symmetric:
                    layer.register_buffer("weight_zero_point", q.zero_point)
    return model


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, each followed by the companions of its frozen layer, under checkpoint names."""
    held = dict(model.named_buffers())
    found: list[tuple[str, Tensor]] = []
    for name, tensor in model.named_parameters():
        found.append((checkpoint_name(name), tensor))
        beside = [f"{name.removesuffix('.weight')}{ending}" for ending in COMPANIONS if name.endswith(".weight")]
        found += [(checkpoint_name(own), held[own]) for own in beside if own in held]
    return found


def fitting_weights(weights: Iterable[tuple[str, Tensor]], held: Plan, plan: Plan) -> WeightStream:
    """A stream of a trainer that serves the plan `held`, for an engine of another `plan`: without the companions of
    weights that have another rollout format there, which would be read as scales of that format."""
    for name, tensor in weights:
        weight = f"{name.rpartition('.')[0]}.weight"
        if not name.endswith(COMPANIONS) or weight_format(held, weight) == weight_format(plan, weight):
            yield name, tensor


def plain_weights(weights: WeightStream, adapters: Adapters | None) -> WeightStream:
    """The float32 function of a stream as plain checkpoint tensors: adapters merged, companions left out."""
    held = dict(weights)
    for name, tensor in held.items():
        if name.endswith((*COMPANIONS, *LORA)):
            continue
        module = name.removesuffix(".weight")
        b = held.get(f"{module}{LORA[1]}")
        if b is not None:
            assert adapters is not None
            tensor = torch.addmm(tensor, b, held[f"{module}{LORA[0]}"], alpha=adapters.alpha / adapters.rank)
        yield name, tensor


def plain_twin(model: Decoder) -> Decoder:
    """A decoder without the wrapping of any part that reads the very same parameters: the unquantized forward.

    Raises ValueError where the model has adapters.
    """
    twin = Decoder(model.config)
    own = dict(named_weights(model))
    if any(name.endswith(LORA) for name in own):
        raise ValueError("adapters: a method that needs shadow log-probabilities cannot train them; leave one of both")
    for name, parameter in list(twin.named_parameters(remove_duplicate=False)):
        source = own.get(name, own["model.embed_tokens.weight"] if name == "lm_head.weight" else None)
        assert isinstance(source, nn.Parameter), name
        assert source.shape == parameter.shape
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, source)
    for name, buffer in model.named_buffers():
        if name in ("_cos", "_sin"):
            twin.register_buffer(name, buffer, persistent=False)
    return twin
