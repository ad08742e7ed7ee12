"""Random prompts of one length and responses that never end by themselves: a load for timing, nothing to learn.

Responses are of one length, or under verl of log-normal ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from harness.foundation.provenance import text_hash
from harness.foundation.seeds import generator
from harness.tasks.contract import Item, Score, check_integer

FIRST = 3
"""The ids below are the special tokens of models that are made here."""


@dataclass(frozen=True)
class Count:
    """The task and its options. The reward is the share of token 13; there is no EOS."""

    prompt_tokens: int = 64
    max_new_tokens: int = 64
    vocab_size: int = 128
    """Prompts are drawn from its ids from 3 on."""
    mean_tokens: int = 0
    """Mean tokens of responses that differ in length, before the cut at `max_new_tokens`; 0: all are that long."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of those lengths."""
    name: str = field(default="count", init=False)
    eos_id: int = field(default=-1, init=False)
    pad_id: int = field(default=0, init=False)
    num_train: int | None = field(default=None, init=False)
    num_eval: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for option, least in (
            ("prompt_tokens", 1),
            ("max_new_tokens", 1),
            ("vocab_size", FIRST + 1),
            ("mean_tokens", 0),
        ):
            check_integer(self.name, option, getattr(self, option), range(least, 2**31))
        if not isinstance(self.sigma, float | int) or not 0 <= self.sigma < math.inf:
            raise ValueError(f"task 'count': sigma={self.sigma!r} is not a number from 0 on")

    def limit(self, index: int, number: int) -> int:
        """Tokens of the `number`-th response to a prompt."""
        if not self.mean_tokens:
            return self.max_new_tokens
        z = torch.randn((), generator=generator("cpu", index, number, "count length"))
        length = self.mean_tokens * math.exp(self.sigma * float(z) - self.sigma**2 / 2)
        return min(max(1, round(length)), self.max_new_tokens)

    def sample(self, split: str, indices: Sequence[int]) -> list[Item]:
        """Prompts of `prompt_tokens` random tokens."""
        items: list[Item] = []
        for i in indices:
            drawn = torch.randint(
                FIRST, self.vocab_size, (self.prompt_tokens,), generator=generator("cpu", split, i, "count")
            )
            items.append(Item(index=i, prompt=tuple(drawn.tolist()), reference="", key=str(i)))
        return items

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        """The share of token 13; 0 without any token."""
        return [Score(reward=list(r).count(13) / max(len(r), 1), is_parsable=True) for r in responses]

    def content_hash(self) -> str:
        """Hash of the sizes: nothing else decides."""
        spread = (self.mean_tokens, self.sigma) if self.mean_tokens else ()
        sizes = (self.prompt_tokens, self.max_new_tokens, self.vocab_size, *spread)
        return text_hash([self.name, *map(str, sizes)])
