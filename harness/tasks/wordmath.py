"""Word problems with written-out solutions: a chain of n quantities, planned and calculated in text.

    <bos> Lan has 7 2 fewer pins than Mo has pears . ... How many pins does Lan have ?
    For Lan 's pins we need Mo 's pears . ... Now Lan has 8 3 - 7 2 = 1 1 pins . #### 1 1 <eos>

The length of the chain is the length axis: n = 4, 10, 30 and 75 take about 88, 246, 784 and 1995 response tokens. There
are several wordings of every sentence, drawn at random in the demonstrations, so that the text has an entropy of its
own, as real text has. Rule: measured by us. Left out: the sentences (`wordmath_language`), how problems are drawn
(`wordmath_problems`), and checks (`wordmath_check`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from harness.foundation.seeds import stable_seed
from harness.models.tokenizer import EOS_ID, PAD_ID
from harness.tasks.contract import Item, Score, Split, check_integer
from harness.tasks.wordmath_check import failure, stated_answer
from harness.tasks.wordmath_language import (
    ITEMS,
    NAMES,
    NUM_FEW_ITEMS,
    NUM_FEW_NAMES,
    NUMBERS,
    SIZES,
    WORDS,
    Layout,
)  # fmt: skip
from harness.tasks.wordmath_problems import (
    Problem,
    Rules,
    Step,
    draw_problem,
    longest_solution,
    prompt_of,
    read_chain,
    solution_of,
    written,
)  # fmt: skip

RULE = 1
"""Version of the problems, the wordings and the scoring."""
EVAL_SHARE = 8
"""One problem in so many is an eval problem, whoever draws it."""
LENGTHS = range(2, 76)
ORDERED_LENGTHS = range(2, 11)
"""Small numbers do not bear long chains."""
POSITIONS = 4096
"""Prompt and longest response fit into so many tokens; a problem that does not is drawn again."""
STATEMENT = 12
"""Mean tokens of a statement, rounded up."""
Reward = Literal["answer", "path"]


@dataclass(frozen=True, kw_only=True)
class Wordmath:
    """The task and its options."""

    n: int = 10
    """Quantities on the chain."""
    layout: Layout = "shuffled"
    """ordered: small numbers as single tokens, statements in the chain's order, no plan, for models of a laptop."""
    distractors: int | None = None
    """Statements that nobody needs, at most n, from n = 67 on fewer; null: 1 to n / 2 where shuffled, none where
    ordered."""
    num_names: int | None = None
    """Different names, at least one for each quantity of a problem; null: all that the vocabulary has."""
    reward: Reward = "answer"
    """answer: the final number must be right. path: every sentence must be, so that the text cannot drift."""
    vocab_size: int = 512
    """Vocabulary of the word tokenizer, hence of the model: 160 (ordered layout alone) or 512. The ids in use are the
    same."""
    name: str = field(default="wordmath", init=False)
    eos_id: int = field(default=EOS_ID, init=False)
    pad_id: int = field(default=PAD_ID, init=False)
    num_train: int | None = field(default=None, init=False)
    num_eval: int | None = field(default=None, init=False)
    ceiling: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        for option, value, valid in (
            ("layout", self.layout, get_args(Layout)), ("reward", self.reward, get_args(Reward)),
            ("vocab_size", self.vocab_size, SIZES if self.layout == "ordered" else SIZES[1:]),
        ):  # fmt: skip
            if value not in valid:
                models = {160: " (model=words_s)", 512: " (model=words_10m)"} if option == "vocab_size" else {}
                shown = ", ".join(f"{choice}{models.get(choice, '')}" for choice in valid)
                raise ValueError(f"task 'wordmath': {option}={value!r}: valid: {shown}")
        is_shuffled = self.layout == "shuffled"
        check_integer(self.name, "n", self.n, LENGTHS if is_shuffled else ORDERED_LENGTHS)
        if self.distractors is not None:  # at most so many that problems which fit are found
            room = (POSITIONS - self.max_new_tokens) // STATEMENT - self.n - (1 + self.n // 5)
            check_integer(self.name, "distractors", self.distractors, range(min(self.n, room) + 1))
        if self.num_names is not None:
            # each quantity may need a name of its own: on the chain, needed by nobody, and where shuffled given alone
            extra = self.distractors if self.distractors is not None else (self.n + 1) // 2 if is_shuffled else 0
            least = self.n + extra + (1 + self.n // 5 if is_shuffled else 0)
            most = NUM_FEW_NAMES if self.vocab_size == SIZES[0] else len(NAMES)
            check_integer(self.name, "num_names", self.num_names, range(least, most + 1))

    @property
    def max_new_tokens(self) -> int:
        return longest_solution(self.n, self.layout)

    @property
    def words(self) -> tuple[str, ...]:
        """Every word of the vocabulary, by id."""
        return WORDS[: self.vocab_size]

    @property
    def firm_ids(self) -> tuple[int, ...]:
        """Tokens that leave no choice of wording: the numbers."""
        return tuple(sorted({token for number in NUMBERS[self.layout] for token in number}))

    @cached_property
    def _rules(self) -> Rules:
        few = self.vocab_size == SIZES[0]
        distractors = 0 if self.layout == "ordered" and self.distractors is None else self.distractors
        names = NAMES[: self.num_names or (NUM_FEW_NAMES if few else None)]
        return Rules(
            self.n, self.layout, distractors, names, ITEMS if self.layout == "shuffled" else ITEMS[:NUM_FEW_ITEMS]
        )

    def _drawn(self, split: Split, indices: Sequence[int]) -> Iterator[tuple[int, Problem, tuple[int, ...]]]:
        """(index, problem, prompt) of every index: by rejection, uniform over the problems of the split."""
        room = POSITIONS - self.max_new_tokens
        taught = (self.n, self.layout, *self._rules[2:3], len(self._rules.names))
        purpose, rng = (self.name, RULE, *map(str, taught), split), random.Random()
        for index in indices:
            rng.seed(stable_seed(*purpose, index))
            while True:
                problem = draw_problem(rng, self._rules)
                if (int(problem.key, 16) % EVAL_SHARE == 0) == (split == "eval"):
                    prompt = prompt_of(rng, problem, self.layout)
                    if len(prompt) <= room:
                        yield index, problem, tuple(prompt)
                        break

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        return [
            Item(index, prompt, written(problem.chain), problem.key)
            for index, problem, prompt in self._drawn(split, indices)
        ]

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        """Right by the option `reward`; parsable where a number stands between #### and EOS at the end."""
        scores: list[Score] = []
        for item, response in zip(items, responses, strict=True):
            answer = stated_answer(response, self.layout)
            wrong = failure(item.reference, response, self.layout)
            right = item.reference.rpartition(" = ")[2]
            is_right = (
                wrong is None if self.reward == "path" else answer is not None and answer.replace(" ", "") == right
            )
            scores.append(Score(float(is_right), answer is not None, wrong, answer))
        return scores

    def answers(self, items: Sequence[Item]) -> list[tuple[int, ...]]:
        """One of the right responses of each item; its wordings are a function of the item."""
        return [self._solution(read_chain(item.reference), "answer", item.key) for item in items]

    def demonstrations(self, indices: Sequence[int], seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(prompt, response) of train items; the wordings of a response are a function of (seed, index)."""
        return [
            (prompt, self._solution(problem.chain, seed, index))
            for index, problem, prompt in self._drawn("train", indices)
        ]

    def _solution(self, chain: Sequence[Step], *parts: int | str) -> tuple[int, ...]:
        rng = random.Random(stable_seed(self.name, "wording", *parts))
        return tuple(solution_of(rng, chain, self.layout))

    def content_hash(self) -> str:
        taught = (self.n, self.layout, str(self._rules.distractors), len(self._rules.names), self.reward)
        return f"{stable_seed(self.name, RULE, *taught):016x}"
