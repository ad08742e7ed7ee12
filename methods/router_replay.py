"""Router replay for mixtures of experts: the trainer's passes use experts that were chosen before.

Papers: R3 (rollout routing replay), arXiv 2510.11370; R2, arXiv 2512.01374, which calls it vanilla routing replay.
Claim: sampler and trainer send about a tenth of a layer's tokens to other experts, which no importance weight can mend;
with the sampler's experts in training the mismatch of a mixture falls to that of a dense model (k3 of Qwen3-30B-A3B
1.5e-3 to 7.5e-4) and training no longer collapses.
Rule: I are the experts of a position, s the trainer's own router logits; g_i = exp(s_i) / sum over I of exp(s_j), so
that the router learns. R3 takes I from the sampler, for old log-probs and updates; R2 from the trainer's own pass over
old log-probs, for updates, so that the first one is unchanged. A backward pass that computes layers again replays, too.
Without norm_topk_prob the gates are the full softmax at I, as in verl.
Ours: the reference of the KL term replays, too, so that the term is 0 for equal policies; positions without a record
(the last token, and the last layer inside the prompt, where neither changes a log-prob) choose for themselves.
Left out: vLLM's own record of its experts; what RSPO does with the shift of the routers (`methods.rspo`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from harness.api import Method, Part, Step
from methods.naive import LOW_BIT


@dataclass(frozen=True, kw_only=True)
class RolloutRouting(Part):
    """R3: every pass of the trainer uses the sampler's experts."""

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"routing"})


@dataclass(frozen=True, kw_only=True)
class OwnRouting(Part):
    """R2: updates use the experts of the trainer's pass before them."""

    needs_updates: ClassVar[int] = 2

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"own_routing"})


METHOD = Method(
    name="router_replay",
    paper="arXiv 2510.11370",
    parts=(RolloutRouting(),),
    precisions=(*LOW_BIT, "bf16"),
    summary="R3: the trainer of a mixture of experts uses the sampler's experts",
    claim="replayed routing halves the k3 of a mixture of experts, to that of a dense model, and prevents collapse",
)
R2 = replace(
    METHOD,
    name="router_replay_r2",
    paper="arXiv 2512.01374",
    parts=(OwnRouting(),),
    summary="R2: updates of a mixture of experts use the trainer's experts before them",
    claim="with few updates a batch, replaying the trainer's own routing does better than replaying the sampler's",
)
