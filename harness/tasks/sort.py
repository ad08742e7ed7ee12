"""Sort n digits: `<bos>31415926=` is answered by `11234569<eos>`. The response length n + 1 is the length axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.foundation.seeds import stable_seed
from harness.models.tokenizer import EOS_ID, PAD_ID
from harness.tasks.contract import Item, Score, Split
from harness.tasks.digits import answer_ids, check_size, draw_digits, exact_match, make_item

RULE = 1
"""Version of the questions and the scoring."""


@dataclass(frozen=True, kw_only=True)
class Sort:
    """The task and its options."""

    n: int = 8
    """Digits per question."""
    vocab_size: int = 32
    """Vocabulary of the character tokenizer, hence of the model: 32 or 128. The ids in use are the same."""
    name: str = field(default="sort", init=False)
    eos_id: int = field(default=EOS_ID, init=False)
    pad_id: int = field(default=PAD_ID, init=False)
    num_train: int | None = field(default=None, init=False)
    num_eval: int | None = field(default=None, init=False)
    ceiling: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        check_size(self.name, self.n, self.vocab_size)

    @property
    def max_new_tokens(self) -> int:
        return self.n + 1

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        drawn = [(index, draw_digits(self.name, self.n, split, index)) for index in indices]
        return [make_item(self.name, index, digits, "", "".join(sorted(digits))) for index, digits in drawn]

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        return exact_match(items, responses)

    def answers(self, items: Sequence[Item]) -> list[tuple[int, ...]]:
        return [answer_ids(item) for item in items]

    def demonstrations(self, indices: Sequence[int], seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Flawless ones: `seed` has nothing to decide."""
        return [(item.prompt, answer_ids(item)) for item in self.sample("train", indices)]

    def content_hash(self) -> str:
        return f"{stable_seed(self.name, RULE, self.n):016x}"
