"""ALP: noise in the hidden states of every layer while the policy is updated.

Paper: arXiv 2603.19470; code adaptive-layerwise-perturbation (patch_qwen2.py), known through notes.
Claim: noise in the numerator flattens the tails of the ratio to the sampler, so that staleness and mismatch do less
harm: 50.53 on average at the level of sequences and 49.62 of tokens, where MIS has 48.74 and no correction 46.66.
Rule: before the input norm of layer l, h <- h + std_l eps with eps from N(0, 1) per element; the generator is seeded
for each micro-batch and layer. The objective is PPO's clip on the ratio of the noisy policy to the sampler. Sampler,
evaluation and the metrics of the mismatch never see the noise.
std: 1e-4 in notes on the paper; the repository has 1e-6, 1e-5 and 1e-2. Left out: a std that is learned, and the
sequence's own clips (0.5 below, 3 above). The noise is one draw a micro-batch, so `launch.micro_batch_tokens` changes
results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from harness.api import Method, Part, Plan, Step
from harness.foundation.seeds import generator
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class ALP(Part):
    """Gaussian noise at the input of decoder layers, in the passes of an update alone."""

    modes: ClassVar[tuple[str, ...]] = ("bypass_ppo",)
    std: float = 1e-4
    """Standard deviation of the noise, in units of the hidden state."""
    first: int = 0
    """First layer with noise; the paper's ablations of late layers start there."""
    count: int | None = None
    """Layers with noise; None: all from the first on."""

    def __post_init__(self) -> None:
        if self.std < 0:
            raise ValueError(f"ALP.std: {self.std} (choose 0 or more)")
        if self.first < 0 or (self.count is not None and self.count < 1):
            raise ValueError(f"ALP.first, count: {self.first}, {self.count} (choose 0 or more, and 1 or more or null)")

    def check(self, plan: Plan, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        if shapes is None:
            return
        num_layers = sum(name.endswith(".input_layernorm.weight") for name in shapes)
        if self.first >= num_layers:
            raise ValueError(
                f"knobs.ALP.first={self.first}: the model has {num_layers} layers; valid: 0 to {num_layers - 1}"
            )

    def during_update(self, model: nn.Module, step: Step, number: int) -> AbstractContextManager[object]:
        backbone = cast("nn.Module", model.model)
        layers = list(enumerate(cast("nn.ModuleList", backbone.layers)))[self.first :]
        seed = (step.seed, step.index, number)
        return noisy(cast("nn.Module", backbone.embed_tokens), layers[: self.count], self.std, seed)


@contextmanager
def noisy(
    embedding: nn.Module, layers: list[tuple[int, nn.Module]], std: float, seed: tuple[int, int, int]
) -> Generator[None]:
    """Context in which the layers' inputs have noise of `std`, the same where a layer is computed again for the
    backward pass. `embedding` begins a pass; `seed`: (run seed, step, update)."""
    num_passes = 0

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal num_passes
        num_passes += 1

    def noise_of(index: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            h = cast("Tensor", inputs[0])
            rng = generator(h.device, seed[0], "alp", *seed[1:], num_passes, index)
            return h + std * torch.randn(h.shape, generator=rng, device=h.device, dtype=h.dtype), *inputs[1:]

        return add

    with ExitStack() as hooks:
        hooks.callback(embedding.register_forward_pre_hook(count).remove)
        for index, layer in layers:
            hooks.callback(layer.register_forward_pre_hook(noise_of(index)).remove)
        yield


METHOD = Method(
    name="alp",
    paper="arXiv 2603.19470",
    parts=(ALP(),),
    precisions=(*LOW_BIT, "bf16"),
    mode="bypass_ppo",
    summary="noise in every layer's hidden state during updates, with PPO's clip on the ratio to the sampler",
    claim="perturbed hidden states flatten the ratio's tails: 49.62 on average, MIS 48.74, uncorrected 46.66",
    reconstructed="the standard deviation, on which the sources differ; the residual stream has the noise, too",
)
