"""Rules that give an FP8 cache its scales, from magnitudes of a policy, of an earlier one, or of one without training.

    1         no calibration, as an engine starts
    vllm      amax of K over 200, of V over 100, of Q over 200, from prompts alone (FP8-RL's inference side)
    nemo      1.05 x amax over 448, from prompts and answers (NeMo-RL; FP8-RL's trainer side)

Either rule is applied to the weights at hand, or its scales are kept while the weights move on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.kv_scales import KV, Role, inference_scale, kv_scale
from harness.studies.fp8_cache.attention import FORMAT, LARGEST, Cache
from harness.studies.fp8_cache.magnitudes import ROLES

Rule = Literal["vllm", "nemo"]
Amaxes = Mapping[Role, Tensor]
"""Role -> float32 [layers, heads]."""
DUMMY = 1e-3
"""vLLM's `load_format=dummy` draws every weight, gains of norms among them, from -1e-3 to 1e-3."""
FACTORS = tuple(2.0**e for e in (-6, -4, -3, -2, -1, 0, 4, 8, 10, 12, 14))
"""Factors on the scale that maps the largest magnitude to the largest code."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to set the scales."""

    name: str
    words: str
    cache: Cache
    factor: float | None = None
    """Factor of a scan, for the arms of one."""


def scales_of(rule: Rule, amax: Amaxes, *, per_head: bool = False) -> dict[Role, Tensor]:
    """Role -> scales [layers, heads], or [layers, 1] over all heads, by a rule."""
    whole: dict[Role, Tensor] = {role: x if per_head else x.amax(-1, keepdim=True) for role, x in amax.items()}
    if rule == "vllm":
        return {role: inference_scale(whole[role], FORMAT, role) for role in whole}
    return {role: kv_scale(whole[role], FORMAT) for role in whole}


def ones(config: DecoderConfig) -> dict[Role, Tensor]:
    """Scale 1 for every role."""
    return {role: torch.ones(config.num_layers, 1) for role in ROLES}


def dummy_decoder(config: DecoderConfig) -> Decoder:
    """A decoder as vLLM's dummy loader leaves it: every parameter uniform within DUMMY."""
    model, draws = Decoder(config), generator("cpu", 0, "dummy weights")
    with torch.no_grad():
        for value in model.parameters():
            value.uniform_(-DUMMY, DUMMY, generator=draws)
    return model


def fresh_decoder(config: DecoderConfig, *, is_wide: bool) -> Decoder:
    """A decoder before training: gains 1 and N(0, 0.02^2), or, `is_wide`, N(0, 1 / inputs) in its linear layers."""
    model = Decoder(config, generator("cpu", 0, "fresh weights"))
    if is_wide:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.dim() == 2 and "embed" not in name and "head" not in name:
                    value.mul_(value.shape[1] ** -0.5 / 0.02)
    return model


def scanned(amax: Amaxes, roles: Sequence[Role]) -> list[Arm]:
    """The scale of some roles over a range of factors; at 1 the largest magnitude becomes the largest code."""
    base: dict[Role, Tensor] = {role: amax[role].amax(-1, keepdim=True) / LARGEST for role in roles}
    words = "".join(roles)
    return [
        Arm(
            name=f"{words} x {factor:g}", words="scan", factor=factor,
            cache=Cache(scales={role: factor * x for role, x in base.items()}),
        )
        for factor in FACTORS
    ]  # fmt: skip


def arms(
    config: DecoderConfig, prompts: Amaxes, everything: Amaxes, untrained: Mapping[str, Amaxes], first: Amaxes | None,
    first_all: Amaxes | None,
) -> list[Arm]:  # fmt: skip
    """The rules to compare. `prompts`, `everything`: of the weights at hand, over a few prompts, and over prompts and
    answers of other questions. `untrained`: of decoders without training by name, over prompts. `first`, `first_all`:
    of the weights that were loaded first, over the same."""
    one, nemo, vllm = ones(config), scales_of("nemo", everything), scales_of("vllm", prompts)

    def arm(name: str, words: str, scales: Mapping[Role, Tensor], roles: Sequence[Role] = KV, p: bool = False) -> Arm:
        return Arm(
            name=name, words=words, cache=Cache(scales={role: scales[role] for role in roles}, rounds_probabilities=p)
        )

    found = [
        arm("1", "no calibration", one),
        arm("vllm", "prompts, every push", vllm),
        arm("nemo", "prompts and answers, every push", nemo),
        arm("nemo, prompts", "prompts alone, every push", scales_of("nemo", prompts)),
    ]
    if first is not None and first_all is not None:
        found += [
            arm("vllm, stale", "prompts, first load alone", scales_of("vllm", first)),
            arm("nemo, stale", "prompts and answers, first load alone", scales_of("nemo", first_all)),
        ]
    found += [
        arm("nemo, heads", "as nemo, a scale a head", scales_of("nemo", everything, per_head=True)),
        arm("1, K", "K alone", one, ("k",)),
        arm("1, V", "V alone", one, ("v",)),
        arm("1, Q", "K, V and queries", one, ROLES),
        arm("1, QP", "FP8 attention: and the softmax weights", one, ROLES, True),
        arm("nemo, QP", "FP8 attention: and the softmax weights", nemo, ROLES, True),
    ]
    return found + [
        arm(f"vllm, {name}", f"prompts, before training: {name} weights", scales_of("vllm", amax))
        for name, amax in untrained.items()
    ]
