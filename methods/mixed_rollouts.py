"""Two samplers of one batch: the rollout format explores, another one answers the same prompts beside it.

A control of ours, no paper's. Every prompt's responses come in part from a second engine with the same weights in
another format, BF16 by default; rewards are compared within the prompt, whoever sampled. So it shows what low-bit
responses add or cost at a given share, from all (share 0 is the plain method) to few. The importance weight of each
token is against the sampler that drew it. Evaluations ask the rollout format.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.api import Method, Part, Plan, Sampler
from harness.numerics.formats import Format, format_named
from methods.flashrl import TIS
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class SecondSampler(Part):
    """One more sampler, with a share of every prompt's responses."""

    share: float = 0.5
    """Its part of every prompt's responses."""
    weights: str = "bf16"
    """Format of its weights."""
    acts: str | None = None
    """Format of the inputs of its linear layers; None: not quantized."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"SecondSampler.share: {self.share} (choose above 0 and below 1)")

    def plan(self, rollout: Plan) -> Plan:
        acts = None if self.acts is None else self._format("acts", self.acts)
        name = self.weights if self.acts is None else f"{self.weights}/{self.acts}"
        second = Sampler(name=name, share=self.share, weights=self._format("weights", self.weights), acts=acts)
        return Plan(samplers=(second,))

    def _format(self, knob: str, name: str) -> Format:
        try:
            return format_named(name)
        except ValueError as error:
            raise ValueError(f"SecondSampler.{knob}: {error}") from None


METHOD = Method(
    name="mixed_rollouts",
    paper="",
    parts=(SecondSampler(), TIS()),
    precisions=LOW_BIT,
    is_control=True,
    summary="half of every prompt's responses from a BF16 sampler of the same weights, with token TIS",
)
