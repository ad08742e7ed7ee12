"""Fitting low-rank adapters so that the output of a frozen low-bit decoder follows its full-precision teacher.

    L = a * D(student, teacher) + g * CE(student, text)        RILQ, arXiv 2412.01129, eq. 5 and 6; code aiha-lab/RILQ

D is a mean squared error of last hidden states or logits, or KL(teacher || student). Both terms are masked means, which
the authors' code has no need of: its text has no padding. Adam, constant rate, rows in fixed cyclic order, the best
validated adapters are kept; the start is validated too, so a fit never ends worse than it began.
Left out: bf16 adapters (masters are float32), temperature, per-channel weights.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Site
from harness.fitting.distill import Tokens
from harness.fitting.distill import texts_of as padded

Align = Literal["hidden_postnorm", "hidden_prenorm", "logit", "kl"]
"""Last hidden state after the final norm (the authors' code) or before it (their README), logits, or distributions."""
VALIDATION = 0.2
"""Share of the sequences that validates (the authors' script)."""


class HasHidden(Protocol):
    """A decoder in two halves, as a fit needs it."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Token ids [B, L] int64 -> final-norm output [B, L, d]."""
        ...

    def head(self, h: Tensor) -> Tensor:
        """[..., d] -> logits [..., V]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Sequences to fit on, right padded."""

    ids: Tensor
    """[N, L] int64."""
    aligned: Tensor
    """[N, L] bool: positions whose output shall be the teacher's."""
    labelled: Tensor
    """[N, L] bool: positions whose next token is text to predict; never the last column."""

    def to(self, device: torch.device) -> Texts:
        """The texts on another device."""
        return Texts(ids=self.ids.to(device), aligned=self.aligned.to(device), labelled=self.labelled.to(device))

    def take(self, rows: Tensor) -> Texts:
        """The texts of some rows, [n] int64."""
        return Texts(ids=self.ids[rows], aligned=self.aligned[rows], labelled=self.labelled[rows])

    def used(self) -> Tensor:
        """[N, L] bool: positions on which an aligned one depends, itself included."""
        return self.aligned.flip(1).cumsum(1).flip(1) > 0


def texts_of(ids: Tensor, prompt_lens: Tensor, lengths: Tensor, is_text: Tensor, tokens: Tokens) -> Texts:
    """Prompts and responses as something to fit on: aligned where a token of the response (or any, with tokens "all")
    is predicted.

    ids [N, L] int64: prompt, response, right padding; prompt_lens, lengths [N] int64: tokens of either; is_text [N]
    bool: rows whose tokens also count as labels, being text that no model wrote.
    """
    at = torch.arange(ids.shape[1], device=ids.device)
    first = prompt_lens - 1 if tokens == "response" else torch.zeros_like(prompt_lens)
    aligned = (at >= first[:, None]) & (at < (prompt_lens + lengths - 1)[:, None]) & (lengths > 0)[:, None]
    return Texts(ids=ids, aligned=aligned, labelled=aligned & is_text[:, None])


def site_texts(site: Site, sequences: int, sampled_frac: float, tokens: Tokens, seed: int) -> Texts:
    """The task's demonstrations and the model's own responses, in turn; what the task cannot show, the model samples.

    `sampled_frac` of the sequences are samples, one stream of `seed`. Raises ValueError where there is nothing to read.
    """
    shown = sequences - round(sampled_frac * sequences)
    rows = [(pair, True) for pair in site.demonstrations(shown)[:shown]]
    own: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], bool]] = []
    if len(rows) < sequences:
        if not site.calibration:
            raise ValueError("adapter fit: the task offers neither enough demonstrations nor prompts")
        prompts = [site.calibration[i % len(site.calibration)] for i in range(sequences - len(rows))]
        rollout = site.sample(site.build(site.checkpoint), prompts, seed)
        own = [((prompt, tuple(ids)), False) for prompt, ids in zip(prompts, rollout.responses(), strict=True)]
    both = min(len(rows), len(own))
    rows = [row for pair in zip(rows, own, strict=False) for row in pair] + rows[both:] + own[both:]
    texts = padded([pair for pair, _ in rows])
    is_text = torch.tensor([is_text for _, is_text in rows])
    return texts_of(texts.ids, texts.prompt_lens, texts.lens - texts.prompt_lens, is_text, tokens)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a fit; the defaults are the authors' script's."""

    align: Align = "hidden_postnorm"
    a: float = 0.5
    """Weight of the distance to the teacher."""
    g: float = 0.5
    """Weight of the cross entropy of the text."""
    lr: float = 1e-4
    batch_size: int = 8
    """Sequences per update."""
    rows_per_pass: int = 8
    """Sequences per forward pass: fewer than `batch_size` accumulate the same gradient in less memory."""
    updates: int = 1250
    validate_every: int = 25
    patience: int = 5
    """Validations without an improvement after which the fit ends."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Course of a fit. The adapters are in the student."""

    log: tuple[float, ...]
    """Validation losses: the start, one per `validate_every` updates, and the end."""
    updates: int

    @property
    def best(self) -> float:
        """Validation loss of the adapters that were kept."""
        return min(self.log)


def aligned_output(model: nn.Module, ids: Tensor, align: Align) -> tuple[Tensor, Tensor]:
    """(what is compared [B, L, D] float32, last hidden states after the norm [B, L, d]); ids [B, L] int64."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    decoder = cast(HasHidden, model)
    if align == "hidden_prenorm":
        handle = model.get_submodule("model.norm").register_forward_pre_hook(keep)
        try:
            h = decoder.hidden(ids)
        finally:
            handle.remove()
        return seen[0].float(), h
    h = decoder.hidden(ids)
    if align == "hidden_postnorm":
        return h.float(), h
    logits = decoder.head(h).float()
    return (logits if align == "logit" else torch.log_softmax(logits, -1)), h


@torch.no_grad()
def targets(teacher: nn.Module, ids: Tensor, align: Align, rows_per_pass: int = 64) -> Tensor:
    """The teacher's outputs at every position, [N, L, D] float32, computed once."""
    return torch.cat([aligned_output(teacher, part, align)[0] for part in ids.split(rows_per_pass)])


def distance(found: Tensor, wanted: Tensor, mask: Tensor, align: Align) -> Tensor:
    """Sum over the mask of the mean squared error over the last axis, or of KL(wanted || found) in nats.

    found (with gradient), wanted [B, L, D] float32: log-probabilities where align is "kl"; mask [B, L] bool.
    """
    found, wanted = found[mask], wanted[mask]
    if align == "kl":
        return F.kl_div(found, wanted, reduction="sum", log_target=True)
    return (found - wanted).square().mean(-1).sum()


def objective(
    student: nn.Module, texts: Texts, wanted: Tensor, recipe: Recipe, counts: tuple[int, int] | None = None
) -> Tensor:
    """The loss of some rows, a scalar. `counts` (aligned, labelled) are those of the whole batch they are a share of.

    wanted [n, L, D] from `targets`. A term without a position is 0.
    """
    aligned, labelled = counts or (int(texts.aligned.sum()), int(texts.labelled.sum()))
    found, h = aligned_output(student, texts.ids, recipe.align)
    loss = recipe.a * distance(found, wanted, texts.aligned, recipe.align) / max(aligned, 1)
    if recipe.g and labelled:
        here = texts.labelled[:, :-1]
        logits = cast(HasHidden, student).head(h[:, :-1][here]).float()
        loss = loss + recipe.g * F.cross_entropy(logits, texts.ids[:, 1:][here], reduction="sum") / labelled
    return loss


@torch.no_grad()
def validate(student: nn.Module, texts: Texts, wanted: Tensor, recipe: Recipe, rows_per_pass: int = 64) -> float:
    """`objective` over all rows, without a graph."""
    counts = int(texts.aligned.sum()), int(texts.labelled.sum())
    total = 0.0
    for rows in torch.arange(len(texts.ids), device=texts.ids.device).split(rows_per_pass):
        total += float(objective(student, texts.take(rows), wanted[rows], recipe, counts))
    return total


def fit(student: nn.Module, wanted: Tensor, texts: Texts, recipe: Recipe) -> Fitted:
    """Train what in `student` requires a gradient, in place, and leave its best validated values there.

    wanted [N, L, D]: the teacher's `targets` of `texts`, whose last rows (`held_out`) validate. Raises ValueError for
    fewer than two.
    """
    if len(texts.ids) < 2:
        raise ValueError(f"adapter fit: {len(texts.ids)} sequences; one to train on and one to validate on at least")
    count = len(texts.ids) - held_out(len(texts.ids))
    index = torch.arange(len(texts.ids), device=texts.ids.device)
    unseen, unseen_wanted = texts.take(index[count:]), wanted[count:]
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=recipe.lr, fused=True)
    log = [validate(student, unseen, unseen_wanted, recipe)]
    kept, best, misses, done = _copies(trained), log[0], 0, 0
    while done < recipe.updates and misses < recipe.patience:
        rows = torch.arange(done * recipe.batch_size, (done + 1) * recipe.batch_size, device=index.device) % count
        batch = texts.take(rows)
        counts = int(batch.aligned.sum()), int(batch.labelled.sum())
        for some in rows.split(recipe.rows_per_pass):
            objective(student, texts.take(some), wanted[some], recipe, counts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        if done % recipe.validate_every == 0 or done == recipe.updates:
            log.append(validate(student, unseen, unseen_wanted, recipe))
            misses = 0 if log[-1] < best else misses + 1
            if log[-1] < best:
                kept, best = _copies(trained), log[-1]
    with torch.no_grad():
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)
    return Fitted(log=tuple(log), updates=done)


def held_out(count: int) -> int:
    """Number of sequences, the last of `count`, that validate."""
    return max(1, round(VALIDATION * count))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
