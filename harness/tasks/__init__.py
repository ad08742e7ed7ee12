"""Tasks: prompts as token ids, reference answers, and the raw 0/1 metric of a response.

    contract.py            items, scores, and what a task is asked for
    chain.py               running sums mod 10, with an imperfect demonstrator
    sort.py                n digits sorted
    count.py               random prompts for timing, nothing to learn
    digits.py              questions of random digits, for those three
    wordmath.py            word problems with written-out solutions
    wordmath_problems.py   random problems, and their solutions
    wordmath_language.py   their vocabulary and wordings
    wordmath_check.py      checks of a response, and its first mistake
    math_data.py           mathematical question sets in their publishers' columns
    math_reward.py         scores of mathematical answers
    math_worker.py         the process that grades them with math-verify
    verl_rules.py          scores of mathematical answers by verl's own rules
    reasoning_gym.py       tasks of the reasoning-gym library
    text_tokens.py         text as token ids, by a model's tokenizer
    data_files.py          rows of parquet and JSON-lines files
    prompt_order.py        the order of a run's training prompts

A task is a value: what it samples is a function of (split, index) alone, so the loop owns all randomness by choosing
indices. Left out: reward shaping (overlong penalty and filtering), which belongs to the algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.foundation.did_you_mean import nearest
from harness.foundation.json_object import read_json_object
from harness.models.tokenizer import char_tokenizer
from harness.tasks.contract import Demonstrated as Demonstrated
from harness.tasks.contract import Item as Item
from harness.tasks.contract import Score as Score
from harness.tasks.contract import Stopping as Stopping
from harness.tasks.contract import Task as Task
from harness.tasks.contract import Worded as Worded
from harness.tasks.contract import check_ends as check_ends
from harness.tasks.contract import check_options
from harness.tasks.contract import failure_shares as failure_shares
from harness.tasks.contract import stop_ids as stop_ids
from harness.tasks.contract import token_ids as token_ids


def _sort() -> type:
    from harness.tasks.sort import Sort

    return Sort


def _chain() -> type:
    from harness.tasks.chain import Chain

    return Chain


def _wordmath() -> type:
    from harness.tasks.wordmath import Wordmath

    return Wordmath


def _count() -> type:
    from harness.tasks.count import Count

    return Count


EMBEDDED: Mapping[str, Callable[[], type]] = {"sort": _sort, "chain": _chain, "wordmath": _wordmath}
"""Tasks that need no data and no text tokenizer."""
TIMED: Mapping[str, Callable[[], type]] = {"count": _count}
"""The same, with nothing to learn: loads for timing."""
MATH = ("gsm8k", "math", "math500", "dapo_math_17k", "deepmath", "bigmath", "deepscaler", "aime", "amc")
TASKS = (*EMBEDDED, *MATH, "reasoning_gym", *TIMED)


def longest_response(name: str, options: Mapping[str, Any]) -> int:
    """Tokens that a response may have by the task's own limit; no data are read. ValueError, one line: an unknown name,
    option or value."""
    if name in MATH:
        from harness.tasks.math_data import math_options

        return math_options(name, options).max_new_tokens
    if name.split(":")[0] == "reasoning_gym":
        from harness.tasks.reasoning_gym import gym_options

        return gym_options(name, options).max_new_tokens
    return build_task(name, options).max_new_tokens


def has_demonstrations(name: str) -> bool:
    """True where the task shows right answers to learn from (`Demonstrated`); no data are read."""
    return name in EMBEDDED and hasattr(EMBEDDED[name](), "demonstrations")


def build_task(name: str, options: Mapping[str, Any], tokenizer_folder: Path | None = None) -> Task:
    """The task `name` with `options` set. ValueError, one line: an unknown name, option or value, or bad data.

    `tokenizer_folder` is the model folder whose tokenizer makes the prompts of text tasks; the embedded tasks bring
    their own, which must be the folder's, too. `reasoning_gym:leg_counting` is short for `reasoning_gym` with the
    option dataset=leg_counting.
    """
    if name in EMBEDDED or name in TIMED:
        kind = {**EMBEDDED, **TIMED}[name]()
        check_options(name, options, [f.name for f in dataclasses.fields(kind) if f.init])
        task = kind(**options)
        if name in EMBEDDED and tokenizer_folder is not None:
            _check_tokens(task, tokenizer_folder / "tokenizer.json")
        return task
    if name in MATH:
        from harness.tasks.math_data import build_math

        return build_math(name, options, tokenizer_folder)
    if name.split(":")[0] == "reasoning_gym":
        from harness.tasks.reasoning_gym import build_reasoning_gym

        return build_reasoning_gym(name, options, tokenizer_folder)
    raise ValueError(f"task {name!r} is unknown: {nearest(name, TASKS)}")


def _check_tokens(task: Task, path: Path) -> None:
    """Raises ValueError where the tokenizer at `path`, if there is one, has other tokens at the ids in which an
    embedded task writes: its questions would be noise to that model."""
    if not path.is_file():
        return
    tokens = task.words if isinstance(task, Worded) else char_tokenizer().tokens
    vocabulary = read_json_object(path).get("model", {}).get("vocab", {})
    own = {token: i for i, token in enumerate(tokens[: len(vocabulary)])}
    if not isinstance(vocabulary, dict) or not own.items() <= vocabulary.items():
        raise ValueError(
            f"task {task.name!r} is written in token ids of models that are trained here, and {path} has other tokens; "
            "name the model's own task, or one in text, e.g. task=gsm8k task.path=FOLDER"
        )
