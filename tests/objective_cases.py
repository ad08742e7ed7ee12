"""The parts of a method within an update: the folds of the loop, for tests of parts that see the current policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.api import Correction, Part, TokenBatch
from harness.objective.loss import Totals, cleaned, count_totals, policy_loss
from tests.loss_cases import Algo, corrected


def updated(parts: Sequence[Part], logp: Tensor, batch: TokenBatch, algo: Algo | None = None) -> Correction:
    """The correction that an update at `logp` applies."""
    c = corrected(parts, batch, algo)
    for part in parts:
        c = part.correct_update(c, logp.detach(), batch, {})
    return c


def objective(
    parts: Sequence[Part], logp: Tensor, batch: TokenBatch, algo: Algo | None = None, totals: Totals | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, its gradient with respect to `logp`) of an update."""
    algo = algo or Algo()
    c = updated(parts, logp, batch, algo)
    owner = next((part for part in parts if type(part).token_loss is not Part.token_loss), None)
    part_loss = None
    if owner is not None:
        clean_logp, clean_batch, clean_c = cleaned(logp, batch, c)
        part_loss = owner.token_loss(clean_logp, clean_c, clean_batch)
    loss, _ = policy_loss(
        logp, batch, c, totals or count_totals(batch.mask, c.keep, 4), algo, part_loss=part_loss,
        owns_objective=owner is not None and owner.owns_objective,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad
