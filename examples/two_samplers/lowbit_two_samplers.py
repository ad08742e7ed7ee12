"""Two samplers: some responses of every prompt in a finer format, as an example of a mixture outside the project.

Claim: none; it is an example. A coarse sampler, in the format of `precision`, and a finer one answer the same prompts.
Rewards are compared within a prompt, whoever sampled. Tokens of the finer sampler all count; those of the coarse one
where the trainer and it agree within a band:

    keep = 1 / C <= pi_old / pi_rollout <= C        C > 1; both policies equal: all tokens

Left out: importance weights, which `flashrl.TIS` has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, Plan, Sampler, TokenBatch
from harness.numerics.formats import format_named
from methods.flashrl import log_rho

COARSE = ("int2", "int3", "int4", "nvfp4")


def in_band(log_ratio: Tensor, bound: float) -> Tensor:
    """1 / C <= rho <= C, bool, for log rho [B, T] in nats and C > 1."""
    return log_ratio.abs() <= torch.tensor(bound).log()


@dataclass(frozen=True, kw_only=True)
class FineSampler(Part):
    """A second sampler with INT8 weights, and a band for the tokens of the first."""

    share: float = 0.25
    """Part of every prompt's responses that the finer sampler draws; times the group size it is a whole number."""
    weights: str = "int8_channel"
    """Format of its weights."""
    bound: float = 2.0
    """C, for the coarse sampler's tokens; must exceed 1."""

    def __post_init__(self) -> None:
        if self.bound <= 1.0:
            raise ValueError(f"FineSampler.bound: {self.bound} does not exceed 1")

    def plan(self, rollout: Plan) -> Plan:
        fine = Sampler(name="fine", share=self.share, weights=format_named(self.weights))
        return Plan(samplers=(fine,))

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        is_coarse = torch.ones_like(b.mask) if b.sampler is None else (b.sampler == 0)[:, None]
        log_ratio = log_rho(b.old_logp, b.rollout_logp, b.mask, "token")
        keep = c.keep & b.valid & (in_band(log_ratio, self.bound) | ~is_coarse)
        memory["kept_frac"] = int(keep.sum()) / max(1, int(b.mask.sum()))
        return replace(c, keep=keep)


METHOD = Method(
    name="two_samplers",
    parts=(FineSampler(),),
    precisions=COARSE,
    summary="a quarter of every prompt's responses from an INT8 sampler, a band for the others",
)
