"""RSPO: policy ratios shrunk where a mixture's router has moved, and their geometric mean over a response.

Paper: router-shift policy optimization, arXiv 2510.23027.
Claim: updates change which experts a token uses, which blows ratios up and precedes collapse; a factor on them that
falls with the router's shift is more stable than GRPO, GSPO and GMPO, and ends higher.

    gamma_t = max(gamma_min, exp(-(1/L) sum over layers (1/k) sum over e of |log p_l(e) - log p_l^old(e)|))
    S = [prod over t of min((gamma_t r_t)^s, e^bound)]^(s / |o|),   s = sign A;   J = mean over responses of S A

e are the k experts that the token used before any update, p the router's softmax over all experts, at the position that
predicts the token; gamma is constant (with its gradient training collapses in 40 steps, say notes). The outer form is
GMPO's (arXiv 2507.20673), whose min(x, clip(x, e1, e2)) is min(x, e2) for every e1. Notes print the factor outside the
clip, where it would enlarge S for A < 0; the abstract has ratios rescaled "prior to clipping": that is the default, and
`place=clipped` is the other. r is current over old policy, so that a correction weight multiplies the loss. Left out:
the product over layers, and experts averaged in probability, options of an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Method, Part, Step, TokenBatch
from harness.objective.loss import log_ratio
from methods.naive import LOW_BIT

Place = Literal["ratio", "clipped"]


def shift_factor(shift: Tensor, smallest: float) -> Tensor:
    """gamma of a router's shift [B, T] nats, in [smallest, 1]."""
    return (-shift).exp().clamp(min=smallest)


def geometric_mean(
    log_r: Tensor, log_gamma: Tensor, sign: Tensor, mask: Tensor, *, bound: float, place: Place
) -> Tensor:
    """[B, T]: S of the response on every token, each with the gradient of its own share.

    log_r [B, T] nats with gradient, log_gamma and sign [B, T] constants, mask [B, T] bool. The sum over a response
    has the gradient of |o| S.
    """
    if place == "ratio":
        bounded = (sign * (log_r + log_gamma)).clamp(max=bound)
    else:
        bounded = (sign * log_r).clamp(max=bound) + log_gamma
    own = torch.where(mask, sign * bounded, 0.0)
    mean = (own.detach().sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    return (own - own.detach() + mean).exp()


@dataclass(frozen=True, kw_only=True)
class RSPO(Part):
    """The geometric mean of shrunk ratios in place of the clipped surrogate."""

    modes: ClassVar[tuple[str, ...]] = ("decoupled",)
    """Ratio and router's shift start at the trainer's old policy, which the bypass modes do not compute."""
    needs_updates: ClassVar[int] = 2
    bound: float = 0.4
    """Largest log-ratio in the direction of the advantage, nats."""
    gamma_min: float = 0.7
    """Smallest factor of a token."""
    place: Place = "ratio"
    """The factor is on the ratio before the clip, or on what the clip leaves."""

    def __post_init__(self) -> None:
        if self.bound <= 0:
            raise ValueError(f"RSPO.bound: {self.bound} cuts the update of an unchanged policy (choose above 0)")
        if not 0 < self.gamma_min <= 1:
            raise ValueError(f"RSPO.gamma_min: {self.gamma_min} is no factor (choose above 0, at most 1)")

    def needs(self, step: Step) -> frozenset[str]:
        return frozenset({"router_shift"})

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        gamma = shift_factor(torch.where(b.mask, b.extras["router_shift"], 0.0), self.gamma_min)
        log_r = log_ratio(logp, b.old_logp)
        mean = geometric_mean(log_r, gamma.log(), b.adv.sign(), b.mask, bound=self.bound, place=self.place)
        return -mean * b.adv


METHOD = Method(
    name="rspo",
    paper="arXiv 2510.23027",
    parts=(RSPO(),),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-mean",
    mode="decoupled",
    summary="geometric mean of policy ratios, each shrunk by how far a mixture's router has moved since sampling",
    claim="ratios rescaled by the router's shift train a mixture of experts more stably and to a higher end",
    reconstructed="the bound (GMPO's), the smallest factor, and that the factor is inside the clip",
)
