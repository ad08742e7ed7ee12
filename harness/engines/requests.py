"""Requests of one `generate` call, checked once and laid out for a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.models.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Distinct prompts, and for every row the one that it continues."""

    prompts: tuple[tuple[int, ...], ...]
    """Every distinct prompt once, in order of first appearance."""
    rows: Tensor
    """[B] int64: the number of its prompt, in request order, samples of one prompt adjacent."""
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0

    def left_padded(self, rows: Tensor, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """The distinct prompts of `rows` [R]: (ids [P, L] int64, lengths [P] int64, prompt of each row [R],
        ascending, or None where every row has its own)."""
        numbers, index = rows.unique_consecutive(return_inverse=True)
        chosen = [self.prompts[i] for i in numbers.tolist()]
        lens = [len(prompt) for prompt in chosen]
        longest = max(lens)
        ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in chosen], device=device)
        return ids, torch.tensor(lens, device=device), None if len(numbers) == len(rows) else index.to(device)


def requests_of(
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    config: DecoderConfig,
    top_p: float = 1.0,
) -> Requests:
    """The checked requests of a call: `num_samples` responses of at most `max_new_tokens` to each of `prompts` (token
    ids). Raises ValueError naming the argument that is out of range."""
    for name, value in (("num_samples", num_samples), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: must be 0 (greedy) or a positive number")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
    numbers: dict[tuple[int, ...], int] = {}
    rows = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    if not rows:
        raise ValueError("prompts: none given")
    if () in numbers:
        raise ValueError(f"prompts: number {rows.index(numbers[()])} is empty")
    longest = max(map(len, numbers))
    if longest + max_new_tokens > config.max_positions:
        total = f"{longest} + {max_new_tokens}"
        raise ValueError(f"a prompt and max_new_tokens need {total} positions; max_positions={config.max_positions}")
    low, high = min(map(min, numbers)), max(map(max, numbers))
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"prompts: token {low if low < 0 else high} is outside the vocabulary of {config.vocab_size}; ask the task "
            "that the model was trained on, with the same options"
        )
    index = torch.tensor(rows).repeat_interleave(num_samples)
    return Requests(
        prompts=tuple(numbers), rows=index, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p
    )
