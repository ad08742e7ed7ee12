"""VESPO: a soft weight of the whole response's importance ratio (arXiv 2602.10693).

Claim: a variational derivation gives phi(W) = exp(lambda) W^k exp(-lambda W), 1 at W = 1, as the coefficient of the
policy gradient: sequence-level, without length normalisation, stable at 64-fold staleness. Loss -sg(phi) A log pi with
(k, lambda) = (2, 3) for A >= 0 and (3, 2) otherwise (run scripts of FloyedShen/VESPO; its docstring has other values).
W is the product over the response of current over old policy, times the correction weights of the tokens: the authors'
and TRL's code both take truncated token ratios of old policy over sampler, here those of the part `TIS`. All in log
space: token terms within +-20, log W within [log 1e-8, 20].
phi falls to 0 for long responses, where W leaves 1 by its variance alone. Left out: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from harness.api import Correction, Method, Part, TokenBatch
from harness.objective.loss import LOG_RATIO_BOUND, log_ratio
from methods.flashrl import TIS
from methods.naive import LOW_BIT

LOG_FLOOR = log(1e-8)
"""Smallest log of a weight and of W."""


def gamma_weight(log_w: Tensor, k: Tensor, lam: Tensor) -> Tensor:
    """phi = exp(lambda + k log W - lambda W), float in [0, exp(lambda)]; log_w, k, lam of shapes that broadcast."""
    log_w = log_w.clamp(LOG_FLOOR, LOG_RATIO_BOUND)
    return (lam + k * log_w - lam * log_w.exp()).exp()


@dataclass(frozen=True, kw_only=True)
class VESPO(Part):
    """The policy gradient with the gamma-shaped weight. Reads the correction weight into W."""

    owns_objective: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("decoupled", "bypass_ppo")
    """bypass_pg weighs by the current policy, which W has in it already."""
    k_pos: float = 2.0
    """Power of W for A >= 0; the weight is largest at W = k / lambda."""
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    """Power of W for A < 0."""
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        if min(self.k_pos, self.lambda_pos, self.k_neg, self.lambda_neg) <= 0:
            raise ValueError("VESPO.k_pos, lambda_pos, k_neg, lambda_neg: all must be above 0")

    def token_loss(self, logp: Tensor, c: Correction, b: TokenBatch) -> Tensor:
        log_weight = c.weight.log().clamp(LOG_FLOOR, LOG_RATIO_BOUND)
        terms = torch.where(b.mask, log_ratio(logp.detach(), b.old_logp) + log_weight, 0.0)
        is_good = b.adv >= 0
        k = torch.where(is_good, self.k_pos, self.k_neg).to(logp.dtype)
        lam = torch.where(is_good, self.lambda_pos, self.lambda_neg).to(logp.dtype)
        phi = gamma_weight(terms.sum(-1, keepdim=True), k, lam)
        return torch.where(c.keep, -phi * b.adv * logp, 0.0)


METHOD = Method(
    claim="a smooth sequence weight trains stably from stale and mismatched rollouts",
    name="vespo",
    paper="arXiv 2602.10693",
    parts=(TIS(), VESPO()),
    precisions=(*LOW_BIT, "bf16"),
    mode="decoupled",
    summary="policy gradient with a soft weight of the response's whole ratio",
)
