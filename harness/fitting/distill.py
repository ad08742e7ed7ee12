"""Knowledge distillation: the divergence of a student's next-token distributions from a teacher's, and its training.

    L = tau^2 sum m w D / sum m w,   D of p_T = softmax(z_T / tau) and p_S = softmax(z_S / tau), one per token

    forward   KL(p_T || p_S), the gradient of which is tau (p_S - p_T) m w / sum m w
    reverse   KL(p_S || p_T)
    skew      KL(p_T || a p_T + (1 - a) p_S)      (DistiLLM, 2402.03898)

The whole vocabulary enters: a teacher cut to its top tokens gives the rare ones no gradient. Left out: hidden states as
targets, and chunks over the vocabulary. Axes: N sequences, b of a batch, L positions, V vocabulary.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Divergence = Literal["forward", "reverse", "skew"]
Weighting = Literal["uniform", "teacher_confidence", "length"]
Tokens = Literal["response", "all"]
"""The predictions that count: those of response tokens, or of every token."""


def divergence(
    student: Tensor, teacher: Tensor, kl: Divergence = "forward", temperature: float = 1.0, alpha: float = 0.1
) -> Tensor:
    """tau^2 D of logits [..., V]: [...] nats, at least 0 up to rounding. The teacher's carry no gradient.

    alpha: the teacher's share of a skewed divergence's second argument. Raises ValueError for two vocabularies.
    """
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(f"the teacher has {teacher.shape[-1]} tokens, the student {student.shape[-1]}; one vocabulary")
    log_s = torch.log_softmax(student / temperature, -1)
    log_t = torch.log_softmax(teacher.detach() / temperature, -1)
    first, second = (log_s, log_t) if kl == "reverse" else (log_t, log_s)
    if kl == "skew":
        mix = torch.tensor([alpha, 1.0 - alpha], dtype=log_t.dtype, device=log_t.device).log()
        second = torch.logaddexp(log_t + mix[0], log_s + mix[1])
    terms = torch.where(first > -torch.inf, first.exp() * (first - second), 0.0)
    return temperature**2 * terms.sum(-1)


def token_weights(teacher: Tensor, mask: Tensor, weighting: Weighting) -> Tensor:
    """w [b, L] of teacher logits [b, L, V] and mask [b, L] bool: 1, the largest probability of the teacher, or
    1 / length."""
    if weighting == "teacher_confidence":
        return torch.softmax(teacher.detach(), -1).amax(-1)
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).to(teacher.dtype)
    return torch.ones_like(mask, dtype=teacher.dtype) / (lengths if weighting == "length" else 1.0)


def weighted_mean(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """sum m w values / sum m w, []; 0 where the mask is empty. Masked places may hold NaN."""
    weights = torch.where(mask, weights, 0.0)
    total = weights.sum()
    return (weights * torch.where(mask, values, 0.0)).sum() / torch.where(total > 0, total, 1.0)


def kd_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    kl: Divergence = "forward",
    temperature: float = 1.0,
    alpha: float = 0.1,
    weighting: Weighting = "uniform",
) -> Tensor:
    """L of student logits [b, L, V] with gradient and teacher logits: []. mask [b, L] bool; the rest may hold NaN."""
    student, teacher = (torch.where(mask[..., None], logits, 0.0) for logits in (student, teacher))
    found = divergence(student, teacher, kl, temperature, alpha)
    return weighted_mean(found, mask, token_weights(teacher, mask, weighting))


def sft_loss(student: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy of student logits [b, L, V] with the tokens [b, L] int64 they predict: [] nats."""
    logits = torch.where(mask[..., None], student, 0.0)
    logp = torch.log_softmax(logits, -1).gather(-1, token_ids[..., None]).squeeze(-1)
    return weighted_mean(-logp, mask, torch.ones_like(logp))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts with responses, right padded."""

    ids: Tensor
    """[N, L] int64."""
    prompt_lens: Tensor
    """[N] int64."""
    lens: Tensor
    """[N] int64, prompt and response."""

    def take(self, rows: Tensor) -> Texts:
        """Some rows, [b] int64, without columns that are padding in all of them."""
        lens = self.lens[rows]
        return Texts(ids=self.ids[rows][:, : int(lens.max())], prompt_lens=self.prompt_lens[rows], lens=lens)

    def to(self, device: torch.device) -> Texts:
        """The texts on another device."""
        return Texts(ids=self.ids.to(device), prompt_lens=self.prompt_lens.to(device), lens=self.lens.to(device))

    def keep(self) -> Tensor:
        """[N, L] bool: no padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lens[:, None]

    def predicted(self, tokens: Tokens) -> Tensor:
        """[N, L - 1] bool: positions whose next token counts."""
        at = torch.arange(1, self.ids.shape[1], device=self.ids.device)
        first = self.prompt_lens[:, None] if tokens == "response" else 1
        return (at >= first) & (at < self.lens[:, None])


def texts_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int = 0) -> Texts:
    """(prompt, response) pairs as one tensor. Raises ValueError where there are none."""
    if not pairs:
        raise ValueError("no text to learn from: 0 sequences")
    lens = torch.tensor([len(prompt) + len(response) for prompt, response in pairs])
    ids = torch.full((len(pairs), int(lens.max())), pad_id)
    for row, (prompt, response) in zip(ids, pairs, strict=True):
        row[: len(prompt) + len(response)] = torch.tensor([*prompt, *response])
    return Texts(ids=ids, prompt_lens=torch.tensor([len(prompt) for prompt, _ in pairs]), lens=lens)


LossOf = Callable[[Tensor, Texts], Tensor]
"""(student logits [b, L - 1, V], the batch) -> scalar loss."""


def fit(
    student: nn.Module,
    texts: Texts,
    loss_of: LossOf,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
    warmup: float = 0.03,
    lr_factor: Callable[[str], float] = lambda name: 1.0,
) -> list[float]:
    """Train `student` (token ids -> logits) in place; the loss of every step, before its update.

    AdamW with betas (0.9, 0.95), no weight decay, gradients clipped at 1, cosine decay after a linear warm-up over the
    share `warmup` of the steps. `lr_factor`: of a parameter, by its name. Raises ValueError where one is not finite.
    """
    named = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    texts = texts.to(next(student.parameters()).device)
    groups = [{"params": [p], "lr": lr * lr_factor(name), "weight_decay": 0.0} for name, p in named]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    first = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        progress = (step - first) / max(1, steps - first)
        return (step + 1) / first if step < first else 0.5 + 0.5 * math.cos(math.pi * progress)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses: list[float] = []
    for rows in _batches(len(texts.ids), batch_size, steps, generator):
        batch = texts.take(rows)
        loss = loss_of(student(batch.ids)[:, :-1], batch)
        if not torch.isfinite(loss):
            raise ValueError(f"distillation diverged at step {len(losses)}: the loss is {loss.item()}; lower lr={lr:g}")
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def _batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of every step: permutations of all of them, one after the other."""
    need, rows = steps * min(size, count), torch.empty(0, dtype=torch.int64)
    while len(rows) < need:
        rows = torch.cat([rows, torch.randperm(count, generator=generator)])
    yield from rows[:need].split(min(size, count))
