"""Largest keys, values and queries over prompts and over answers, and sharpness of attention.

Axes: B rows, H heads, K key-value heads, T queries, L positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.models.decoder import Decoder
from harness.numerics.kv_scales import Role
from harness.studies.fp8_cache.answers import Answers
from harness.studies.fp8_cache.attention import scores

ROLES: tuple[Role, ...] = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class Magnitudes:
    """Magnitudes of one policy on a batch of answers."""

    prompts: Mapping[Role, Tensor]
    """Role -> float32 [layers, heads]: largest magnitude over the prompts."""
    answers: Mapping[Role, Tensor]
    """The same over the answers' tokens."""
    median: Mapping[Role, float]
    """Role -> median magnitude over everything, the mean of the layers' medians."""
    max_score: float
    """Largest score before a softmax, of an answer's token."""
    attention_entropy: float
    """Mean entropy of the softmax weights, nats, over heads, layers and tokens of answers."""
    top_weight: float
    """Mean of the largest softmax weight."""

    def all(self) -> dict[Role, Tensor]:
        """Role -> float32 [layers, heads]: largest magnitude over prompts and answers."""
        return {role: torch.maximum(self.prompts[role], self.answers[role]) for role in ROLES}

    def summary(self) -> dict[str, Any]:
        """Numbers for a record: by role the largest magnitude of each part over all layers, the largest ratio of
        answers to prompts of any layer, and what says how sharp attention is."""
        found: dict[str, Any] = {
            "max_score": self.max_score, "attention_entropy": self.attention_entropy, "top_weight": self.top_weight,
        }  # fmt: skip
        for role in ROLES:
            a, b = self.prompts[role].amax(-1), self.answers[role].amax(-1)
            found[role] = {
                "prompts": float(a.amax()), "answers": float(b.amax()), "ratio_max": float((b / a).amax()),
                "ratio_min": float((b / a).amin()), "median": self.median[role],
            }  # fmt: skip
        return found


@torch.inference_mode()
def magnitudes(model: Decoder, answers: Answers) -> Magnitudes:
    """One exact pass over the answers, part by part. Sharpness is that of the answers' tokens."""
    layers: list[Any] = list(model.model.layers)
    largest: dict[str, list[dict[Role, Tensor]]] = {name: [{} for _ in layers] for name in ("prompts", "answers")}
    medians: dict[Role, list[float]] = {role: [] for role in ROLES}
    sharp: list[tuple[float, float, float, int]] = []

    def look(number: int, places: tuple[Tensor, Tensor], core: Any, args: tuple[Any, ...]) -> None:
        q, k, v, at = args
        for role, x in zip(ROLES, (q, k, v), strict=True):
            size = x.abs()
            for name, place in zip(largest, places, strict=True):
                own = torch.where(place[:, None, :, None], size, 0.0).amax((0, 2, 3))
                known = largest[name][number]
                known[role] = torch.maximum(known.get(role, own), own)
            medians[role].append(float(size.transpose(1, 2)[places[0] | places[1]].median()))
        raw = scores(q, k, at).transpose(1, 2)[places[1]]
        log_weights = torch.log_softmax(raw, -1)
        weights = log_weights.exp()
        entropy = -(weights * log_weights.clamp(min=-1e4)).sum(-1)
        sharp.append((float(raw.amax()), float(entropy.sum()), float(weights.amax(-1).sum()), entropy.numel()))

    for part in answers.parts():
        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                hooks.enter_context(
                    layer.self_attn.core.register_forward_pre_hook(partial(look, number, part.places()))
                )
            model.hidden(part.ids)
    count = sum(number for *_, number in sharp)
    return Magnitudes(
        prompts={role: torch.stack([layer[role] for layer in largest["prompts"]]) for role in ROLES},
        answers={role: torch.stack([layer[role] for layer in largest["answers"]]) for role in ROLES},
        median={role: sum(values) / len(values) for role, values in medians.items()},
        max_score=max(top for top, *_ in sharp),
        attention_entropy=sum(entropy for _, entropy, _, _ in sharp) / count,
        top_weight=sum(weight for *_, weight, _ in sharp) / count,
    )
