"""VCPO: the step shrinks with the effective sample size of the batch.

Paper: arXiv 2602.17616; code mit-han-lab/vcpo (verl/workers/utils/vcpo.py).
Claim: with stale or mismatched rollouts the effective sample size (ESS) of the responses' importance weights falls
before the reward does; a learning rate that falls with it keeps training stable at a lag of up to 128 steps.
Rule, per update of B responses: w_i = exp(sum_t (log pi_old - log pi_rollout)), q = (sum w)^2 / (B sum w^2), and the
learning rate is multiplied by min(1, q / q0)^(1/2), or by the ratio itself. The loss has a sequence weight with cap 8;
the ESS is of the weights before the cap, the code's default.
The code adds 1e-8 to sum w^2, which breaks the rule where all weights are tiny; here everything is in logarithms.
Clips are off in the released scripts (algo.eps_low=1, a large algo.eps_high). Left out: the baseline of least variance,
which needs the norm of every response's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

from torch import Tensor

from harness.api import Memory, Method, Part, TokenBatch
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


METHOD = Method(
    name="vcpo",
    paper="arXiv 2602.17616",
    parts=(TIS(cap=8.0, level="sequence"), ESSStep()),
    precisions=(*LOW_BIT, "bf16"),
    agg="seq-mean-token-mean",
    summary="the learning rate falls with the effective sample size of the responses' weights, with sequence TIS",
    claim="a step that shrinks with the effective sample size trains stably at a lag of 128 steps",
)
