"""Running sum mod 10: `<bos>+3141=` is answered by all partial sums, `3489<eos>`, taught by an imperfect demonstrator.

The demonstrator sets the base model's accuracy by design: each step is right with probability `accuracy ** (1 / n)`.
Of the errors, the share `misconceptions` comes from a fixed set of (sum, digit) pairs for which one fixed wrong digit
is written with probability 0.7 or so; greedy decoding of a model that imitates them is wrong as well. The rest are
random slips. After an error the sum goes on from the wrong digit. Rule: measured by us.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from harness.foundation.seeds import stable_seed
from harness.models.tokenizer import EOS_ID, PAD_ID, encode
from harness.tasks.contract import Item, Score, Split
from harness.tasks.digits import answer_ids, check_size, draw_digits, exact_match, make_item

RULE = 1
"""Version of the questions, the demonstrator and the scoring."""
HABIT = 0.7
"""Share of the cases in which a misconception is acted on, before rounding to a whole number of (sum, digit) pairs."""


@dataclass(frozen=True)
class Demonstrator:
    """The error model of one (n, accuracy, misconceptions)."""

    slip: float
    """Probability per step of a random wrong digit."""
    habit: float
    """Probability of the misconception's digit where there is a misconception."""
    wrong: Mapping[tuple[int, int], int]
    """(sum so far, digit) -> the digit written by habit."""


@cache
def demonstrator(n: int, accuracy: float, misconceptions: float) -> Demonstrator:
    """The error model whose answers to n uniform digits are right with probability `accuracy`, exactly.

    The nominal error per step 1 - accuracy ** (1 / n) fixes the pairs, dealt round over the sums; the steps of one
    answer are not quite independent, so slip and habit are then scaled to fit. ValueError: there is no such model.
    """
    error = 1 - accuracy ** (1 / n)
    num_pairs = round(100 * error * misconceptions / HABIT)
    num_pairs = max(num_pairs, 1) if error * misconceptions > 0 else 0
    habit = 100 * error * misconceptions / max(num_pairs, 1)
    slip = error * (1 - misconceptions)
    if num_pairs > 100 or habit + slip > 1:
        raise ValueError(f"task 'chain': accuracy={accuracy!r} is too low for n={n}, misconceptions={misconceptions!r}")
    rng = random.Random(stable_seed("chain", "misconceptions", RULE, num_pairs))
    sums = sorted(range(10), key=lambda _: rng.random())
    order = {total: sorted(range(10), key=lambda _: rng.random()) for total in sums}
    pairs = [(sums[k % 10], order[sums[k % 10]][k // 10]) for k in range(num_pairs)]
    wrong = {(total, digit): (total + digit + 1 + int(9 * rng.random())) % 10 for total, digit in pairs}
    low, high = 0.0, 1 / (habit + slip) if error else 0.0
    for _ in range(60):
        scale = (low + high) / 2
        is_too_good = _accuracy(n, Demonstrator(slip * scale, habit * scale, wrong)) > accuracy
        low, high = (scale, high) if is_too_good else (low, scale)
    return Demonstrator(slip * high, habit * high, wrong)


def _accuracy(n: int, how: Demonstrator) -> float:
    """Share of flawless answers: the n-th power of the 10 x 10 matrix from one right sum to the next, from sum 0."""
    step = np.zeros((10, 10))
    for total, digit in itertools.product(range(10), repeat=2):
        step[total, (total + digit) % 10] = (1 - how.slip - how.habit * ((total, digit) in how.wrong)) / 10
    return float(np.linalg.matrix_power(step, n)[0].sum())


def demonstrate(digits: str, how: Demonstrator, rng: random.Random) -> str:
    """The partial sums as the demonstrator writes them. Only `rng.random()` is drawn from: it is the same on every
    Python version."""
    total, written = 0, ""
    for digit in map(int, digits):
        chance, shift = rng.random(), 1 + int(9 * rng.random())
        right = (total + digit) % 10
        if chance < how.slip:
            total = (right + shift) % 10
        elif (total, digit) in how.wrong and chance < how.slip + how.habit:
            total = how.wrong[total, digit]
        else:
            total = right
        written += str(total)
    return written


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The task and its options."""

    n: int = 8
    """Digits per question."""
    accuracy: float = 0.35
    """Share of the demonstrator's answers that are right throughout. 1 is flawless."""
    misconceptions: float = 0.6
    """Share of its errors that are systematic."""
    vocab_size: int = 32
    """Vocabulary of the character tokenizer, hence of the model: 32 or 128. The ids in use are the same."""
    name: str = field(default="chain", init=False)
    eos_id: int = field(default=EOS_ID, init=False)
    pad_id: int = field(default=PAD_ID, init=False)
    num_train: int | None = field(default=None, init=False)
    num_eval: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_size(self.name, self.n, self.vocab_size)
        for option, low in (("accuracy", 0.01), ("misconceptions", 0.0)):
            value = getattr(self, option)
            if not isinstance(value, float | int) or not low <= value <= 1:
                raise ValueError(f"task 'chain': {option}={value!r} is not a number from {low} to 1")
        demonstrator(self.n, self.accuracy, self.misconceptions)

    @property
    def ceiling(self) -> float:
        return self.accuracy

    @property
    def max_new_tokens(self) -> int:
        return self.n + 1

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        drawn = [(index, draw_digits(self.name, self.n, split, index)) for index in indices]
        return [make_item(self.name, index, digits, "+", _partial_sums(digits)) for index, digits in drawn]

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        return exact_match(items, responses)

    def answers(self, items: Sequence[Item]) -> list[tuple[int, ...]]:
        return [answer_ids(item) for item in items]

    def demonstrations(self, indices: Sequence[int], seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The demonstrator's answers to train questions; its errors are a function of (seed, index)."""
        how = demonstrator(self.n, self.accuracy, self.misconceptions)
        shown: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for index in indices:
            digits = draw_digits(self.name, self.n, "train", index)
            rng = random.Random(stable_seed(seed, "chain demonstration", index))
            prompt = make_item(self.name, index, digits, "+", "").prompt
            shown.append((prompt, (*encode(demonstrate(digits, how, rng)), EOS_ID)))
        return shown

    def content_hash(self) -> str:
        taught = (repr(float(self.accuracy)), repr(float(self.misconceptions)))
        return f"{stable_seed(self.name, RULE, self.n, *taught):016x}"


def _partial_sums(digits: str) -> str:
    return "".join(str(total % 10) for total in itertools.accumulate(map(int, digits)))
