"""The contract of a task: its items, the score of a response, and what the loop and the base trainer ask of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from harness.foundation.did_you_mean import nearest

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Item:
    """One question."""

    index: int
    prompt: tuple[int, ...]
    """Token ids, no padding."""
    reference: str
    """Answer that the score compares with; its form is the task's own."""
    key: str
    """Hash of the question's content: equal keys are the same question."""


@dataclass(frozen=True)
class Score:
    """The raw metric of one response."""

    reward: float
    """1.0 right, 0.0 wrong; in between where a task grades."""
    is_parsable: bool
    """False where no answer could be read. Such a response earns 0 but is counted apart from a wrong one."""
    failure: str | None = None
    """First mistake on the way to the answer, where a task can say; an answer may be right all the same."""
    answer: str | None = field(default=None, compare=False)
    """The answer as it was read, equal for equal answers, so that samples can vote; None where none could be read, or
    the task does not tell."""


class Task(Protocol):
    """A task as the loop, the base trainer and the reports use it."""

    @property
    def name(self) -> str: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_train(self) -> int | None:
        """Train indices are 0 <= i < num_train; None: any non-negative integer."""
        ...

    @property
    def num_eval(self) -> int | None: ...

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        """The items at `indices`. The same index is the same item on every machine; no train item is an eval item."""
        ...

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        """One score per (item, response) pair. A response is token ids without padding, its EOS included if sampled."""
        ...

    def content_hash(self) -> str:
        """Changes whenever a question, a reference or the scoring rule changes."""
        ...


@runtime_checkable
class Ended(Protocol):
    """A task whose responses end at several token ids, those of a model folder's generation_config."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response beside `eos_id`."""
        ...


def stop_ids(task: Task) -> tuple[int, ...]:
    """Ids that end a response of the task beside its `eos_id`; empty for most."""
    return task.stop_ids if isinstance(task, Ended) else ()


def token_ids(task: Task) -> dict[str, Any]:
    """The ids of the task that an engine takes: `eos_id`, `stop_ids` and `pad_id`."""
    return {"eos_id": task.eos_id, "stop_ids": stop_ids(task), "pad_id": task.pad_id}


def check_ends(tasks: Sequence[Task]) -> None:
    """Raises ValueError where the responses of two tasks end at other token ids: one engine answers all of them."""
    ends = [(task.name, sorted({task.eos_id, *stop_ids(task)})) for task in tasks]
    for name, ids in ends:
        if ids != ends[0][1]:
            raise ValueError(
                f"task {name!r} ends responses at the token ids {ids}, task {ends[0][0]!r} at {ends[0][1]}, and one "
                "engine answers both; ask them apart"
            )


class Demonstrated(Task, Protocol):
    """A task that can show right answers, and whose `n` is the size of its problems: the embedded ones."""

    @property
    def n(self) -> int: ...
    @property
    def ceiling(self) -> float:
        """Accuracy of the demonstrations."""
        ...

    def answers(self, items: Sequence[Item]) -> list[tuple[int, ...]]:
        """A right response of each item, EOS included; the only one, unless the task is `Worded`."""
        ...

    def demonstrations(self, indices: Sequence[int], seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(prompt, response with EOS) of train items, for supervised fine-tuning."""
        ...


@runtime_checkable
class Worded(Demonstrated, Protocol):
    """A task whose right answers differ in wording and length, in words of its own."""

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, by id."""
        ...

    @property
    def firm_ids(self) -> tuple[int, ...]:
        """Tokens that the words before them leave no choice about in a right answer."""
        ...


@runtime_checkable
class Stopping(Protocol):
    """A task whose responses may end before EOS, at a text of its own."""

    @property
    def pad_id(self) -> int: ...

    def num_kept(self, response: Sequence[int]) -> int:
        """Tokens of a response up to the first with which it contains a text to stop at; all of them without one."""
        ...


def failure_shares(scores: Sequence[Score]) -> dict[str, float]:
    """Share of the responses by what goes wrong first; empty where the task does not say."""
    counts = Counter(score.failure for score in scores if score.failure is not None)
    return {name: counts[name] / len(scores) for name in sorted(counts)}


def check_options(name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """ValueError naming the first option that task `name` does not have."""
    for option in options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}: {nearest(option, known)}")


def check_integer(task: str, option: str, value: object, valid: range) -> None:
    """ValueError unless the value of a task's option is an integer of a range."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in valid:
        raise ValueError(f"task {task!r}: {option}={value!r} is not an integer from {valid.start} to {valid.stop - 1}")
