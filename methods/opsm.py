"""OPSM: a bad response that the policy has moved away from is not learnt from (DeepSeek-V3.2, arXiv 2512.02556 Eq. 9).

Claim: a model learns most from its own mistakes; highly off-policy negative samples destabilize. A response with A < 0
is dropped if mean_t(log pi_b - log pi) > delta, pi being the current policy; one with A >= 0 never is.
The paper's pi_b is the sampler ("the sampling probability directly returned by the inference framework"), so one
number sees mismatch and staleness. It does not give delta: TRL suggests 0.5 with that anchor; slime and miles take the
trainer's old policy and 1e-4, which drops nothing before the second update of a batch. With the sampler as anchor 1e-4
is below the mean mismatch of every low-bit format and would drop every long response with A < 0.
Denominators count what is dropped, as in both. Left out: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.dppo import Anchor, anchor_logp
from methods.flashrl import log_rho
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class OPSM(Part):
    """Off-policy sequence masking, per update."""

    anchor: Anchor = "rollout"
    """Policy that the current one is compared with: the sampler, or the trainer before any update on this batch."""
    delta: float = 0.5
    """Largest mean log-ratio of a kept response with A < 0, nats per token."""

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise ValueError(f"OPSM.delta: {self.delta} would drop responses of an unchanged policy (choose 0 or more)")

    @property
    def needs_updates(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2 if self.anchor == "old" else 1

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bypass modes have no policy before the update: in verl the sampler takes its place."""
        return ("decoupled",) if self.anchor == "old" else ()

    def correct_update(self, c: Correction, logp: Tensor, b: TokenBatch, memory: Memory) -> Correction:
        drift = -log_rho(logp, anchor_logp(b, self.anchor), b.mask, "geometric")
        return replace(c, keep=c.keep & ~((b.adv < 0) & (drift > self.delta)))


METHOD = Method(
    claim="dropping bad responses that have gone off policy stabilises large-scale RL",
    name="opsm",
    paper="arXiv 2512.02556",
    parts=(OPSM(),),
    precisions=(*LOW_BIT, "bf16"),
    denom="original",
    summary="bad responses that the current policy has left are dropped",
    reconstructed="the threshold: the paper gives none, 0.5 nats per token is TRL's suggestion",
)
SLIME = replace(
    METHOD,
    name="opsm_slime",
    paper="arXiv 2512.02556 as in slime and miles",
    parts=(OPSM(anchor="old", delta=1e-4),),
    summary="opsm against the trainer's old policy, threshold 1e-4",
    reconstructed="",
)
