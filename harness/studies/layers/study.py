"""The linear layers of one policy in a rollout format, one at a time: the KL that each causes by itself.

A place is what engines fuse into one matrix: queries, keys and values; the output of attention; gate and up; down.
Axes: B answers, L positions, T answer tokens of the longest, N answer tokens of all, V vocabulary, K inputs of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Plan
from harness.engines.embedded.weights import LiveWeights
from harness.foundation.seeds import stable_seed
from harness.models.decoder import Decoder
from harness.numerics.formats import Format
from harness.numerics.linear import EmulatedLinear
from harness.numerics.quantize import fake_quantize
from harness.studies.fp8_cache.answers import (
    Answers,
    divergence,
    exact_engine,
    log_probs,
    mean_k3,
    prompts_of,
    sampled,
)
from harness.tasks import Task

ALL, REST = "all", "all but the worst"
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One fused matrix of the engine, as the modules of a decoder that it replaces."""

    name: str
    """Layer and modules, such as `5 down_proj`."""
    linears: Mapping[str, EmulatedLinear]
    """Module of the decoder -> the same in the format."""


def places(model: Decoder, plan: Plan) -> list[Place]:
    """Every place that the plan quantizes, from the first layer on, its weights as the embedded engine has them. Raises
    ValueError for a mixture, and where nothing is quantized."""
    if model.config.num_experts:
        raise ValueError("a mixture of experts: lowbit layers takes dense models")
    fmt = plan.rollout_weights
    if fmt is None or fmt.tile is None:
        raise ValueError(f"precision.weights={fmt and fmt.name}: quantizes no linear layer; valid are int8, fp8_block, "
                         "int4 and others that round weights")  # fmt: skip
    live = LiveWeights(model.config, plan, torch.device("cpu"))
    live.load((name, value.detach()) for name, value in model.named_parameters())
    found: list[Place] = []
    for key, home in live.places.items():
        whole = live.linears[key]
        names = [module.rpartition(".")[2] for module in home.modules]
        rows = [model.get_parameter(f"{module}.weight").shape[0] for module in home.modules]
        biases = [None] * len(rows) if whole.bias is None else whole.bias.split(rows)
        linears = {
            module: EmulatedLinear(weight, bias, acts=whole.acts, base=None)
            for module, weight, bias in zip(home.modules, whole.weight.split(rows), biases, strict=True)
        }
        found.append(Place(name=f"{key.partition('.')[0]} {', '.join(names)}", linears=linears))
    return sorted(found, key=lambda place: int(place.name.split()[0]))


@contextmanager
def replaced(model: Decoder, chosen: Sequence[Place]) -> Iterator[None]:
    """While the block runs, the decoder computes these places in the format."""
    kept = {name: model.get_submodule(name) for place in chosen for name in place.linears}
    try:
        for place in chosen:
            for name, linear in place.linears.items():
                model.set_submodule(name, linear)
        yield
    finally:
        for name, module in kept.items():
            model.set_submodule(name, module)


class Rounding:
    """Sums over tokens of what rounding the inputs of one place does: errors in, errors out, values lost."""

    def __init__(self, acts: Format, weight: Tensor) -> None:
        """`weight` [rows, K] float32 is the place's own, exact."""
        self.acts, self.weight = acts, weight
        self.num_values = self.num_lost = 0.0
        self.inputs = self.inputs_off = self.outputs = self.outputs_off = 0.0

    def add(self, x: Tensor) -> None:
        """Count x [N, K] float32."""
        low = fake_quantize(x, self.acts)
        self.num_values += float((x != 0).sum())
        self.num_lost += float(((low == 0) & (x != 0)).sum())
        self.inputs += _squared(x)
        self.inputs_off += _squared(low - x)
        self.outputs += _squared(F.linear(x, self.weight))
        self.outputs_off += _squared(F.linear(low - x, self.weight))

    def shares(self) -> dict[str, float]:
        """Share of values lost, and errors of inputs and outputs over their size (root mean squares)."""
        return {
            "lost": self.num_lost / max(self.num_values, 1.0),
            "error_in": (self.inputs_off / max(self.inputs, 1e-30)) ** 0.5,
            "error_out": (self.outputs_off / max(self.outputs, 1e-30)) ** 0.5,
        }


def _squared(x: Tensor) -> float:
    return float(x.double().square().sum())


def roundings(model: Decoder, chosen: Sequence[Place], answers: Answers) -> dict[str, dict[str, float]]:
    """Place -> `Rounding.shares` over prompts and answers of an exact pass, of the places whose inputs are rounded."""
    found: dict[str, Rounding] = {}
    for place in chosen:
        acts = next(iter(place.linears.values())).acts
        weight = torch.cat([model.get_parameter(f"{name}.weight") for name in place.linears])
        if acts is not None:
            found[place.name] = Rounding(acts=acts, weight=weight.detach())
    for part in answers.parts():
        with ExitStack() as hooks:
            for place in (place for place in chosen if place.name in found):
                first = model.get_submodule(next(iter(place.linears)))
                look = partial(_look, found[place.name], part)
                hooks.enter_context(first.register_forward_pre_hook(look))
            log_probs(model, part)
    return {name: rounding.shares() for name, rounding in found.items()}


def _look(rounding: Rounding, part: Answers, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Count the inputs of a module at positions of prompts and answers; the last layer computes only those that predict
    an answer's token."""
    x, (is_prompt, is_answer) = args[0], part.places()
    is_whole = x.shape[1] == part.ids.shape[1]
    is_real = is_prompt | is_answer if is_whole else torch.arange(x.shape[1]) < part.lens[:, None]
    rounding.add(x[is_real].float())


def compare(
    model: Decoder, task: Task, plan: Plan, *, num_answers: int, tell: Tell
) -> tuple[list[dict[str, Any]], int]:
    """(a row for every place alone, for all of them, and for all but the worst; tokens of the answers). A row has the
    mean KL of the sampler to the trainer a token with its 95 % interval (answers as clusters), nats, and what rounding
    does to the place's inputs. The answers are those of the exact policy to `num_answers` held-out questions."""
    chosen = places(model, plan)
    prompts = prompts_of(task, num_answers)
    answers = sampled(exact_engine(model, task), task, prompts, seed=stable_seed(0, "layers"))
    exact = log_probs(model, answers)
    seen = roundings(model, chosen, answers)

    def row(name: str, own: Sequence[Place]) -> dict[str, Any]:
        with replaced(model, own):
            k3 = divergence(log_probs(model, answers), exact)
        found = mean_k3(k3, answers)
        tell(f"{name}: k3 {found['k3']:.2g}")
        return {"name": name, **found, **seen.get(name, {})}

    rows = [row(place.name, [place]) for place in chosen]
    worst = max(rows, key=lambda one: one["k3"])["name"]
    rows.append(row(ALL, chosen))
    rows.append(row(REST, [place for place in chosen if place.name != worst]))
    return rows, len(answers.tokens())
