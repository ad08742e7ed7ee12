"""VCPO: the step shrinks with the effective sample size of the batch.

Paper: arXiv 2602.17616; code mit-han-lab/vcpo (verl/workers/utils/vcpo.py).
Claim: with stale or mismatched rollouts the effective sample size (ESS) of the responses' importance weights falls
before the reward does; a learning rate that falls with it keeps training stable at a lag of up to 128 steps.
Rule, per update of B responses: w_i = exp(sum_t (log pi_old - log pi_rollout)), q = (sum w)^2 / (B sum w^2), and the
learning rate is multiplied by min(1, q / q0)^(1/2), or by the ratio itself. The loss has a sequence weight with cap 8;
the ESS is of the weights before the cap, the code's default.
The code adds 1e-8 to sum w^2, which breaks the rule where all weights are tiny; here everything is in logarithms.
Clips are off in the released scripts (algo.eps_low=1, a large algo.eps_high).
Rule B, the baseline of least variance: b = sum W R / sum W over the responses to a prompt, W = (w |g|)^2 with g the
gradient of a response, in place of their mean. No hook has |g|, so `vcpo_baseline` takes it as equal for all responses
to a prompt (ours). Left out: |g|; the median and the trimmed mean, options of the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log
from typing import ClassVar, Literal

import torch
from torch import Tensor

from harness.api import Correction, Memory, Method, Part, TokenBatch
from methods.flashrl import TIS, log_rho
from methods.naive import LOW_BIT


def ess_share(log_weight: Tensor) -> float:
    """Effective sample size of weights over their number, from 1 / B to 1; 0 without a weight.

    log_weight [B] float nats: any finite size, only differences count.
    """
    if not log_weight.numel():
        return 0.0
    w = (log_weight.double() - log_weight.double().max()).exp()
    return float(w.sum().square() / w.square().sum() / w.numel())


def step_factor(q: float, q0: float, rule: Literal["sqrt", "linear"]) -> float:
    """min(1, q / q0), or its square root."""
    share = min(1.0, q / q0)
    return share**0.5 if rule == "sqrt" else share


@dataclass(frozen=True, kw_only=True)
class ESSStep(Part):
    """The learning rate of every update, by the effective sample size of its responses."""

    q0: float = 1.0
    """Share of effective responses from which on the step is whole."""
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Power with which the learning rate follows the share: 1/2 or 1."""
    cap: float | None = None
    """Largest weight that enters the ESS; None: as it is."""

    def __post_init__(self) -> None:
        if not 0 < self.q0 <= 1:
            raise ValueError(f"ESSStep.q0: {self.q0} (choose above 0, at most 1)")
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"ESSStep.cap: {self.cap} (choose above 0, or null)")

    def update_lr_factor(self, b: TokenBatch, memory: Memory) -> float:
        log_weight = log_rho(b.old_logp, b.rollout_logp, b.mask, "sequence")[b.valid.any(-1), 0]
        if self.cap is not None:
            log_weight = log_weight.clamp(max=log(self.cap))
        memory["ess_share"] = ess_share(log_weight)
        return step_factor(memory["ess_share"], self.q0, self.rule)


def least_variance_baseline(reward: Tensor, log_weight: Tensor, log_norm: Tensor, group: Tensor) -> Tensor:
    """b of every row's group: [B] of the dtype of `reward`. It minimises sum W (R - b)^2, W = exp(2 (log w + log |g|)).

    reward [B] in any unit, log_weight and log_norm [B] nats: only differences within a group count; group [B] int64.
    """
    power, count = 2.0 * (log_weight + log_norm), int(group.max()) + 1
    most = power.new_full((count,), -inf).scatter_reduce(0, group, power, "amax")
    share = (power - most[group]).exp()
    weighted, total = (reward.new_zeros(count).index_add(0, group, x.to(reward)) for x in (share * reward, share))
    return (weighted / total)[group]


@dataclass(frozen=True, kw_only=True)
class OptimalBaseline(Part):
    """The group's mean gives way to the baseline of least variance, gradients of responses taken as equally long."""

    modes: ClassVar[tuple[str, ...]] = ("decoupled",)

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        log_weight = log_rho(b.old_logp, b.rollout_logp, b.mask, "sequence")[:, 0].double()
        group = torch.zeros_like(b.mask[:, 0], dtype=torch.int64) if b.group is None else b.group
        is_some = b.valid.any(-1)  # the advantage of a response is one number on all of its tokens
        adv = torch.where(b.valid, b.adv, 0.0).double().sum(-1) / b.valid.sum(-1).clamp(min=1)
        rows = is_some.nonzero().flatten()
        shift = torch.zeros_like(adv)
        if len(rows):
            some, equal, of = adv[rows], torch.zeros_like(adv[rows]), group[rows]
            mean = least_variance_baseline(some, equal, equal, of)
            shift[rows] = mean - least_variance_baseline(some, log_weight[rows], equal, of)
            memory["shift"] = float(shift[rows].abs().mean())
        return c.shifted(shift[:, None].expand_as(c.weight))


METHOD = Method(
    name="vcpo",
    paper="arXiv 2602.17616",
    parts=(TIS(cap=8.0, level="sequence"), ESSStep()),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-mean",
    summary="the learning rate falls with the effective sample size of the responses' weights, with sequence TIS",
    claim="a step that shrinks with the effective sample size trains stably at a lag of 128 steps",
)
WITH_BASELINE = replace(
    METHOD,
    name="vcpo_baseline",
    parts=(*METHOD.parts, OptimalBaseline()),
    mode="decoupled",
    summary="vcpo, and the baseline of least variance in place of the mean of a prompt's responses",
    reconstructed="gradients of the responses to a prompt are taken as equally long in the baseline",
)
