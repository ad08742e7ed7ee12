"""The golden example of the loss rules, random batches, and the few lines that turn a batch into a loss and a gradient.

Golden example (B = 3, T = 4, float64): log-probs of sampler, old and current policy whose losses, gradients, weights
and metrics are known from verl's own functions or from an independent script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.api import Correction, Part, Step, TokenBatch
from harness.foundation.seeds import generator
from harness.objective.loss import Totals, count_totals, policy_loss, start
from harness.trainers.corrected_step import take_batch, take_correction

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
ROLLOUT = torch.tensor([[-0.5, -1.0, -3.0, -0.2], [-0.7, -2.0, -0.4, 0.0], [-0.1, -0.6, 0.0, 0.0]], dtype=torch.float64)
LOG_RHO = torch.tensor([[0, 0.1, 1.2, -0.3], [0.05, -0.9, 0.2, 0], [-0.02, 0.02, 0, 0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[0, 0.3, 0.25, -0.3], [0.1, -0.4, 0.5, 0], [0.02, -0.02, 0, 0]], dtype=torch.float64)
ADV = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64).expand(3, 4)
assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
assert_published = partial(torch.testing.assert_close, rtol=0.0, atol=6e-7)
"""For values given to six decimals."""
STEP = Step(index=0, total=10, seed=0)


@dataclass(frozen=True, kw_only=True)
class Algo:
    """Settings of an algorithm that `policy_loss` reads."""

    loss: str = "ppo"
    mode: str = "decoupled"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = 3.0
    agg: str = "token-mean"
    denom: str = "original"
    kl_coef: float = 0.0
    kl_type: str = "k3"
    entropy_coef: float = 0.0


def golden_batch() -> TokenBatch:
    """The batch of the golden example."""
    return TokenBatch(
        token_ids=torch.zeros(3, 4, dtype=torch.int64),
        mask=MASK,
        adv=ADV,
        rollout_logp=ROLLOUT,
        old_logp=ROLLOUT + LOG_RHO,
        step=STEP,
    )


def golden_logp() -> Tensor:
    """The current log-probs of the golden example, with gradient."""
    return (ROLLOUT + LOG_RHO + LOG_RATIO).requires_grad_()


def response(
    logp: Sequence[float], *, old: Sequence[float], rollout: Sequence[float], adv: float | Sequence[float]
) -> tuple[Tensor, TokenBatch]:
    """(current log-probs with gradient, batch) of one response; nats per token, and one advantage or one per token."""
    current, before, sampled = (torch.tensor([row], dtype=torch.float64) for row in (logp, old, rollout))
    batch = TokenBatch(
        token_ids=torch.arange(len(logp))[None],
        mask=torch.ones(current.shape, dtype=torch.bool),
        adv=torch.tensor(adv, dtype=torch.float64).expand(current.shape),
        rollout_logp=sampled,
        old_logp=before,
        step=STEP,
    )
    return current.requires_grad_(), batch


def random_batch(
    *seed: int | str, size: tuple[int, int] = (6, 7), spread: float = 0.4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, TokenBatch]:
    """(current log-probs with gradient, batch) with unequal lengths; the last row has no token of the mask."""
    rng = generator("cpu", *seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=rng, dtype=dtype)

    rows, width = size
    lengths = torch.randint(1, width + 1, (rows,), generator=rng)
    lengths[0], lengths[-1] = width, 0
    rollout = normal(0.7) - 1.5
    old = rollout + normal(spread)
    logp = (old + normal(0.3)).requires_grad_()
    adv = torch.randn(rows, 1, generator=rng, dtype=dtype).expand(size)
    batch = TokenBatch(
        token_ids=torch.zeros(size, dtype=torch.int64),
        mask=torch.arange(width) < lengths[:, None],
        adv=adv,
        rollout_logp=rollout,
        old_logp=old,
        step=STEP,
        version=torch.full(size, STEP.index),
    )
    return logp, batch


def corrected(parts: Sequence[Part], batch: TokenBatch, algo: Algo | None = None) -> Correction:
    """The parts' `correct` hooks, folded from the correction that changes nothing."""
    algo = algo or Algo()
    c = start(batch, algo.eps_low, algo.eps_high)
    for part in parts:
        c = part.correct(c, batch, {})
    return c


def value_and_gradient(
    logp: Tensor, batch: TokenBatch, c: Correction, algo: Algo, totals: Totals | None = None, max_len: int = 4
) -> tuple[Tensor, Tensor]:
    """(loss, its gradient with respect to `logp`)."""
    totals = totals or count_totals(batch.mask, c.keep, max_len)
    loss, _ = policy_loss(logp, batch, c, totals, algo)
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad


def rows_of(batch: TokenBatch, c: Correction, rows: Tensor | slice) -> tuple[TokenBatch, Correction]:
    """Some rows of a batch and of its correction."""
    index = torch.arange(len(batch.mask))[rows]
    return take_batch(batch, index), take_correction(c, index)
