"""Sampling of tokens: an exponential race over the full softmax, and the record of what was drawn.

Temperature is inside the log-probability, and so is what `nucleus` leaves out of improbable tokens: in evaluations,
which no trainer scores, and in training where the trainer keeps to the same tokens (`Sequences.allowed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.api import Rollout
from harness.numerics.experts import OWN

Draws = Sequence[tuple[int, torch.Generator]]
"""Chunks of a batch: rows of each, and the generator of its noise."""


def race_noise(draws: Draws, vocab_size: int) -> Tensor:
    """Exponential(1) noise [rows of all chunks, V] float32 for one step.

    It comes from 24-bit uniforms, the fast generator on a CPU: probabilities below 2^-24 are not resolved. A uniform of
    0 gives the largest finite number, so that a token which alone has a probability wins even then.
    """
    first, *others = [torch.rand(rows, vocab_size, generator=chunk, device=chunk.device) for rows, chunk in draws]
    return (torch.cat([first, *others]) if others else first).log_().clamp_(min=torch.finfo(first.dtype).min).neg_()


def scaled_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [R, V] float32 nats of logits [R, V] float32; at temperature 0 those of temperature 1."""
    return torch.log_softmax(logits if temperature in (0.0, 1.0) else logits / temperature, -1)


def nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """Log-probabilities [R, V] float32 of the most probable tokens that together have at least `top_p`, renormalised;
    -inf elsewhere. 1 changes nothing (Holtzman et al., arXiv 1904.09751)."""
    if top_p >= 1.0:
        return log_probs
    ordered, index = log_probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    is_left_out = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return torch.log_softmax(log_probs.masked_fill(is_left_out, float("-inf")), -1)


def pick(log_probs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(token [R] int64, its log-probability [R] float32 nats) from log-probabilities [R, V].

    The token with the largest p / noise wins, which happens with probability p (the "exponential race"). Without noise
    the most probable one.
    """
    token = log_probs.argmax(-1) if noise is None else log_probs.exp().div_(noise).argmax(-1)
    return token, log_probs.gather(1, token[:, None])[:, 0]


class Transcript:
    """Tokens that the rows of one batch have sampled so far, and the rows that go on."""

    def __init__(
        self, rows: int, max_new_tokens: int, end_ids: Sequence[int], pad_id: int, device: torch.device
    ) -> None:
        """`end_ids`: each of them ends a row."""
        self.end_ids, self.pad_id = tuple(end_ids), pad_id
        self.tokens = torch.full((max_new_tokens, rows), pad_id, dtype=torch.int64, device=device)
        self.logp = torch.zeros(max_new_tokens, rows, device=device)
        self.is_alive = torch.ones(rows, dtype=torch.bool, device=device)
        """True per computed row, like `rows`, while it has not ended."""
        self.rows: Tensor | None = None
        """Original row of every row still computed, [n] int64; None while that is all of them."""
        self.num_steps = 0
        self.log_probs: list[Tensor] | None = None
        """Per step [rows, V] float32 nats, 0 for rows that have ended; None: not kept."""
        self.experts: Tensor | None = None
        """As in `Rollout`; None: not kept."""

    def keep_experts(self, prompts: Tensor, width: int) -> None:
        """Keep the experts of every position from now on: those of the prompts [rows, P, layers, k] int64, and room for
        `width` positions in all."""
        rows, length, *rest = prompts.shape
        self.experts = prompts.new_full((rows, width, *rest), OWN, dtype=torch.int16)
        self.experts[:, :length] = prompts.to(torch.int16)

    def record_experts(self, position: Tensor, experts: list[Tensor]) -> None:
        """Keep the experts, layer by layer [computed rows, k], at the position [computed rows] int64 of each row."""
        if self.experts is not None:
            found = torch.stack(experts, 1).to(torch.int16)
            rows = torch.arange(len(position), device=position.device) if self.rows is None else self.rows
            self.experts[rows, position] = found.where(self.is_alive[:, None, None], OWN)

    def keep_log_probs(self) -> None:
        """Keep the whole distribution of every step from now on."""
        self.log_probs = []

    def record_log_probs(self, log_probs: Tensor) -> None:
        """Keep the distribution [computed rows, V] of the step that `record` is called for next."""
        if self.log_probs is not None:
            whole = log_probs.new_zeros(self.tokens.shape[1], log_probs.shape[1])
            rows = slice(None) if self.rows is None else self.rows
            whole[rows] = torch.where(self.is_alive[:, None], log_probs, 0.0)
            self.log_probs.append(whole)

    def record(self, token: Tensor, logp: Tensor) -> None:
        """Record one step of every computed row; rows that have ended keep their padding."""
        token = torch.where(self.is_alive, token, self.pad_id)
        logp = torch.where(self.is_alive, logp, 0.0)
        t, self.num_steps = self.num_steps, self.num_steps + 1
        if self.rows is None:
            self.tokens[t], self.logp[t] = token, logp
        else:
            self.tokens[t].index_copy_(0, self.rows, token)
            self.logp[t].index_copy_(0, self.rows, logp)
        for end in self.end_ids:
            self.is_alive &= token != end

    def retire(self) -> Tensor:
        """Stop computing rows that have ended; returns the computed rows that stay, [n] int64, ascending."""
        kept = self.is_alive.nonzero()[:, 0]
        self.rows = kept if self.rows is None else self.rows[kept]
        self.is_alive = self.is_alive[kept]
        return kept

    def rollout(self) -> Rollout:
        """Tokens and log-probs [B, T] of the whole batch; T is the limit, not the longest response."""
        tokens, logp = self.tokens.t().contiguous(), self.logp.t().contiguous()
        is_end = torch.zeros_like(tokens, dtype=torch.bool)
        for end in self.end_ids:
            is_end |= tokens == end
        truncated = ~is_end.any(1)
        lengths = torch.where(truncated, tokens.shape[1], is_end.int().argmax(1) + 1)
        log_probs = None
        if self.log_probs is not None:
            log_probs = torch.stack(self.log_probs, 1)
            log_probs = torch.nn.functional.pad(log_probs, (0, 0, 0, tokens.shape[1] - log_probs.shape[1]))
        return Rollout(
            token_ids=tokens, logp=logp, lengths=lengths, truncated=truncated, log_probs=log_probs, experts=self.experts
        )


def join(parts: list[Rollout], width: int | None) -> Rollout:
    """Join the batches of one call into one rollout, `width` tokens wide (None: the longest response)."""
    names = [name for name in Rollout.__dataclass_fields__ if getattr(parts[0], name) is not None]
    fields = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    width = int(fields["lengths"].max()) if width is None else width
    for name in set(names) - {"lengths", "truncated", "experts"}:
        fields[name] = fields[name][:, :width].contiguous()
    return Rollout(**fields)
