"""Questions made of n random digits: drawing, splitting and scoring, shared by the embedded tasks.

There is any number of questions; which split one belongs to is decided by its own content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from harness.foundation.seeds import stable_seed
from harness.models.tokenizer import BOS_ID, DIGIT_0_ID, EOS_ID, char_tokenizer, decode, encode
from harness.tasks.contract import Item, Score, Split, check_integer

EVAL_SHARE = 16
"""One in so many digit strings is an eval question, whoever draws it."""
LENGTHS = range(2, 1025)
RIGHT, WRONG, UNPARSABLE = Score(1.0, True), Score(0.0, True), Score(0.0, False)
DIGITS = frozenset(range(DIGIT_0_ID, DIGIT_0_ID + 10))


def split_of(task: str, digits: str) -> Split:
    """The split this question belongs to: a function of its content, so the splits cannot share one."""
    return "eval" if stable_seed(task, "split", digits) % EVAL_SHARE == 0 else "train"


def draw_digits(task: str, n: int, split: Split, index: int) -> str:
    """Question `index` of `split`: uniform over the strings of n digits of that split, by rejection."""
    attempt = 0
    while True:
        seed = f"{task} {n} {split} {index} {attempt}".encode()
        bits = int.from_bytes(hashlib.shake_256(seed).digest(n // 2 + 16), "little")
        digits = str(bits % 10**n).zfill(n)  # 4n + 128 random bits: the remainder's bias is below 2^-128
        if split_of(task, digits) == split:
            return digits
        attempt += 1


def make_item(task: str, index: int, digits: str, marker: str, reference: str) -> Item:
    """`<bos>`, the task's marker, the digits, `=`."""
    prompt = (BOS_ID, *encode(f"{marker}{digits}="))
    return Item(index, prompt, reference, f"{stable_seed(task, 'key', digits):016x}")


def answer_ids(item: Item) -> tuple[int, ...]:
    """The one right response, EOS included."""
    return (*encode(item.reference), EOS_ID)


def exact_match(items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
    """Right: the reference's characters, then EOS, and nothing else. Parsable: any digits, then EOS."""
    scores: list[Score] = []
    right = {reference: (*encode(reference), EOS_ID) for reference in {item.reference for item in items}}
    for item, response in zip(items, responses, strict=True):
        answer = tuple(response)
        if answer == right[item.reference]:
            scores.append(replace(RIGHT, answer=item.reference))
        else:
            is_answer = len(answer) > 1 and answer[-1] == EOS_ID and DIGITS.issuperset(answer[:-1])
            scores.append(replace(WRONG, answer=decode(answer[:-1])) if is_answer else UNPARSABLE)
    return scores


def check_size(task: str, n: int, vocab_size: int) -> None:
    """ValueError unless the digit task `task` can ask for n digits with that vocabulary."""
    check_integer(task, "n", n, LENGTHS)
    char_tokenizer(vocab_size)
