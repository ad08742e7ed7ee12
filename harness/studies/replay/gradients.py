"""From pulls on tokens to gradients of the policy: one forward pass of a batch, one backward pass per distinct pull."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.api import Sequences
from harness.studies.replay.arms import Arm, Pull, pull
from harness.studies.replay.store import Stored
from harness.trainers.local.trainer import LocalTrainer

CHUNK_BYTES = 2**29
"""Memory for gradients that are held at once."""
OWN_PASS = 0.6
"""An arm that pulls at fewer sequences than this share of the usual number gets a forward pass of its own."""
SAME = 1e-4
"""Arms whose pulls differ by no more than this share of the largest one coincide: an exact sampler with a cache and the
trainer's own forward pass differ by up to 1e-5 nats per token."""


@dataclass(frozen=True, kw_only=True)
class Pulls:
    """Every arm on every batch of one sampler."""

    by_arm: dict[str, list[Pull]]
    same_as: dict[str, str]
    """Arm -> the first arm with the same pulls (`SAME`), itself where there is none."""


def current_logp(trainer: LocalTrainer, stored: Stored, is_moved: bool) -> list[Tensor]:
    """Log-probs of the trainer's policy per batch: the stored ones bit for bit where it has not moved."""
    if not is_moved:
        return [stored.batch(b).old_logp for b in range(stored.num_batches)]
    return [trainer.score(stored.sequences(b)).logp for b in range(stored.num_batches)]


def pulls_of(arms: Sequence[Arm], stored: Stored, logp: list[Tensor]) -> Pulls:
    """Evaluate every arm, and find which of them coincide."""
    by_arm: dict[str, list[Pull]] = {}
    same_as: dict[str, str] = {}
    distinct: dict[str, Tensor] = {}
    for arm in arms:
        found = [pull(arm, stored.batch(b), logp[b], stored.meta["max_new_tokens"]) for b in range(stored.num_batches)]
        flat = torch.cat([one.grad.flatten() for one in found])
        near = SAME * float(flat.abs().max())
        same_as[arm.name] = next((n for n, other in distinct.items() if (flat - other).abs().max() <= near), arm.name)
        if same_as[arm.name] == arm.name:
            distinct[arm.name] = flat
        by_arm[arm.name] = found
    return Pulls(by_arm=by_arm, same_as=same_as)


def gradients(
    trainer: LocalTrainer, stored: Stored, pulls: dict[str, list[Tensor]], on_batch: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """Name -> [S, D] float32 gradients of the S batches; `pulls` holds [B, T] per name and batch.

    Gradients add up, so an arm that treats few sequences otherwise than an earlier one is that arm's plus a correction.
    """
    names = list(pulls)
    whole = torch.stack([torch.stack(pulls[name]) for name in names])
    parents = nearest_earlier(whole)
    own = torch.stack([one if p is None else one - whole[p] for one, p in zip(whole, parents, strict=True)])
    found = torch.zeros(len(names), stored.num_batches, sum(p.numel() for p in trainer.parameters))
    for b in range(stored.num_batches):
        found[:, b] = batch_gradients(trainer, stored.sequences(b), own[:, b])
        if on_batch is not None:
            on_batch()
    for a, parent in enumerate(parents):
        if parent is not None:
            found[a] += found[parent]
    return dict(zip(names, found, strict=True))


def nearest_earlier(pulls: Tensor) -> list[int | None]:
    """For every arm of [A, S, B, T] the earlier one that fewest sequences differ from; None: zero is nearer."""
    parents: list[int | None] = []
    for a, one in enumerate(pulls):
        counts = [int((one != 0).any(-1).sum())] + [int((one != other).any(-1).sum()) for other in pulls[:a]]
        best = min(range(len(counts)), key=counts.__getitem__)
        parents.append(best - 1 if best else None)
    return parents


def batch_gradients(trainer: LocalTrainer, seqs: Sequences, pulls: Tensor) -> Tensor:
    """Sum over tokens of pull x d logp / d theta: pulls [A, B, T] -> [A, D] float32.

    Arms that pull at most of the sequences share a forward pass; the others get one over their own sequences alone.
    """
    is_used = (pulls != 0).any(-1)
    out = torch.zeros(len(pulls), sum(p.numel() for p in trainer.parameters))
    counts = is_used.sum(1)
    usual = counts.median()
    together = (counts >= OWN_PASS * usual) & (counts <= usual / OWN_PASS)
    for arms in [together.nonzero().flatten(), *(~together).nonzero()]:
        rows_used = is_used[arms].any(0).nonzero().flatten()
        for rows in rows_used.split(trainer.rows_per_pass(seqs.ids.shape[1])):
            if not len(rows):
                continue
            logp = trainer.score(seqs.take(rows.to(seqs.ids.device)), keep_graph=True).logp
            for i, a in enumerate(arms.tolist()):
                one = pulls[a, rows].to(logp.device)
                parts = torch.autograd.grad(logp, trainer.parameters, one, retain_graph=i + 1 < len(arms))
                out[a] += torch.cat([part.flatten() for part in parts]).cpu()
    return out


def chunks(names: Sequence[str], num_batches: int, size: int) -> list[list[str]]:
    """Names in groups whose gradients fit `CHUNK_BYTES`."""
    most = max(1, CHUNK_BYTES // (4 * num_batches * size))
    return [list(names[i : i + most]) for i in range(0, len(names), most)]


def move(trainer: LocalTrainer, gradient: Tensor) -> None:
    """One optimizer step of the trainer along `gradient` [D]: what makes stored batches one update old."""
    start = 0
    for parameter in trainer.parameters:
        part = gradient[start : start + parameter.numel()]
        parameter.grad = part.view_as(parameter).to(parameter)
        start += parameter.numel()
    trainer.step()
