"""Tasks of the reasoning-gym library by name (extra `tasks`): generated questions, each scored by its own data set.

Left out: data sets whose scoring runs Python's `eval` or sympy's parser over the model's answer. Questions come from a
pool of `size` (the library's neighbouring seeds share almost all questions, so one seed is used); the hash of a
question's text decides its split. Response form: the answer between <answer> and </answer>.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from harness.foundation.did_you_mean import nearest
from harness.foundation.seeds import stable_seed
from harness.tasks.contract import Item, Score, Split
from harness.tasks.text_tokens import (
    TextOptions,
    TextTask,
    TextTokenizer,
    load_text_tokenizer,
    parse_options,
    prompt_ids,
    response_text,
)

RULE = 1
"""Version of the prompts and of how questions are drawn."""
EVAL_SHARE = 8
"""One question in so many is an eval question."""
TEMPLATE = "{question}\n\nThink first, then give only the answer between <answer> and </answer>."
EXECUTING = frozenset({"eval", "exec", "parse_expr", "sympify"})
"""Functions that run what they are given, by any module's name."""
REVIEWED = frozenset({"basic_arithmetic", "bitwise_arithmetic", "number_sorting", "propositional_logic"})
"""Data sets that call one of them on their own questions only (read in version 0.1.25)."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of data sets whose scoring does not expect every answer, as of prime_factorization where it is no number."""


@dataclass(frozen=True, kw_only=True)
class GymOptions(TextOptions):
    """The options of a reasoning-gym task."""

    dataset: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The data set's own settings."""
    size: PositiveInt = 10000
    """Questions in the pool; word_ladder allows 20000."""
    template: str = TEMPLATE
    max_new_tokens: PositiveInt = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class GymTask(TextTask):
    """The task. Train indices are any integers; eval indices count the eval questions of the pool."""

    name: str
    options: GymOptions
    dataset: Any
    """A `reasoning_gym` procedural data set."""
    version: str
    """Version of the library: a new one may ask other questions."""
    tokens: TextTokenizer
    num_train: int | None = field(default=None, init=False)
    num_eval: int | None = field(default=None, init=False)
    evaluated: list[int] = field(default_factory=list[int], init=False)
    """Pool positions of the eval questions found so far, in order."""

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        """Raises ValueError for an eval index beyond the pool."""
        find = self._eval_position if split == "eval" else self._train_position
        return [self._item(index, find(index)) for index in indices]

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        """The data set's own grade of what stands in the last <answer>; without one, and where the data set cannot read
        it, unparsable."""
        return [self._score(item, response) for item, response in zip(items, responses, strict=True)]

    def _score(self, item: Item, response: Sequence[int]) -> Score:
        answer = extract_tagged(response_text(self.tokens, response))
        if answer is None:
            return Score(0.0, False)
        entry = self.dataset[json.loads(item.reference)["position"]]
        try:
            return Score(float(self.dataset.score_answer(answer, entry)), True, answer=answer)
        except UNREADABLE:
            return Score(0.0, False)

    def content_hash(self) -> str:
        parts = [RULE, self.version, self.options.dataset, dict(self.options.config), self.options.size]
        parts += [self.options.template, self.options.system]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _item(self, index: int, position: int) -> Item:
        entry = self.dataset[position]
        reference = json.dumps({"position": position, "answer": str(entry["answer"])})
        messages = self.options.messages(entry["question"])
        return Item(index, prompt_ids(self.tokens, messages, self.options.chat_options), reference, _key(entry))

    def _train_position(self, index: int) -> int:
        attempt = 0
        while True:
            position = stable_seed("reasoning_gym", self.options.dataset, index, attempt) % self.options.size
            if not _is_eval(self.dataset[position]):
                return position
            attempt += 1

    def _eval_position(self, index: int) -> int:
        while len(self.evaluated) <= index:
            start = self.evaluated[-1] + 1 if self.evaluated else 0
            found = next((p for p in range(start, self.options.size) if _is_eval(self.dataset[p])), None)
            if found is None:
                raise ValueError(
                    f"task {self.name!r} has {len(self.evaluated)} eval questions at size={self.options.size}: "
                    f"index {index} is none"
                )
            self.evaluated.append(found)
        return self.evaluated[index]


def build_reasoning_gym(name: str, options: Mapping[str, Any], tokenizer_folder: Path | None) -> GymTask:
    """`reasoning_gym` with the option `dataset`, or `reasoning_gym:<dataset>`. ValueError says what is wrong."""
    settings = gym_options(name, options)
    dataset, version = _create(name, settings)
    if all(_is_eval(dataset[position]) for position in range(settings.size)):
        raise ValueError(f"task {name!r}: size={settings.size}: no question of the pool is a train question")
    tokens = load_text_tokenizer(tokenizer_folder, name, settings)
    return GymTask(
        name=f"reasoning_gym:{settings.dataset}", options=settings, dataset=dataset, version=version, tokens=tokens
    )


def gym_options(name: str, options: Mapping[str, Any]) -> GymOptions:
    """The options of reasoning-gym task `name`. Raises ValueError for an unknown one, a wrong value, or no dataset."""
    short = name.partition(":")[2]
    values = {**({"dataset": short} if short else {}), **options}
    settings = parse_options(name, GymOptions, values, list(GymOptions.__dataclass_fields__))
    if not settings.dataset:
        raise ValueError(f"task {name!r} needs the option dataset: task.options.dataset=leg_counting, for example")
    return settings


def extract_tagged(text: str) -> str | None:
    """Text between the last <answer> and the </answer> after it, stripped; None if either is missing."""
    _before, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if opened and closed else None


def executes_answers(source: str) -> bool:
    """True where Python source calls anything that could run a string it is given."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
    return bool(names & EXECUTING)


def _create(name: str, options: GymOptions) -> tuple[Any, str]:
    try:
        from importlib.metadata import version

        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"task {name!r} needs the extra 'tasks': pip install 'lowbit-rl-bench[tasks]'") from error
    if options.dataset not in DATASETS:
        raise ValueError(
            f"reasoning-gym has no data set {options.dataset!r}: {nearest(options.dataset, list(DATASETS))}"
        )
    kind = DATASETS[options.dataset][0]
    if options.dataset not in REVIEWED and executes_answers(inspect.getsource(inspect.getmodule(kind) or kind)):
        raise ValueError(f"reasoning-gym data set {options.dataset!r} is refused: its scoring could execute an answer")
    seed = stable_seed("reasoning_gym", "pool", RULE) % 2**31
    try:
        dataset = create_dataset(options.dataset, seed=seed, size=options.size, **options.config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"task {name!r}: config={dict(options.config)}: {error}") from error
    return dataset, version("reasoning-gym")


def _key(entry: Mapping[str, Any]) -> str:
    return hashlib.blake2b(str(entry["question"]).encode(), digest_size=8).hexdigest()


def _is_eval(entry: Mapping[str, Any]) -> bool:
    return int(_key(entry), 16) % EVAL_SHARE == 0
