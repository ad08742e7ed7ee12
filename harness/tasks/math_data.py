r"""Mathematical question sets in the columns their publishers use, from the Hugging Face hub or from local files.

| task | hub | columns read | splits: train, eval |
| --- | --- | --- | --- |
| gsm8k | openai/gsm8k, config main | question, answer (after `####`) | train, test |
| math500 | HuggingFaceH4/MATH-500 | problem, answer | none, test |
| dapo_math_17k | BytedTsinghua-SIA/DAPO-Math-17k | prompt, reward_model, extra_info | one, by content |
| aime (year 2024) | Maxwell-Jia/AIME_2024 | Problem, Answer | none, train |
| aime (year 2025) | math-ai/aime25 | problem, answer | none, test |
| amc | math-ai/amc23 | question, answer | none, test |

Files are parquet or JSON lines. DAPO-Math-17k repeats its questions a hundred times: the first of each index is kept.
Where one file serves both splits, the hash of a question's text decides its side, so the splits never share one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.tasks.contract import Item, Score, Split, check_options
from harness.tasks.data_files import find_files, read_rows
from harness.tasks.math_reward import MathGrader
from harness.tasks.text_tokens import Message, TextTask, TextTokenizer, load_text_tokenizer, prompt_ids, response_text

RULE = 1
"""Version of the prompts and the scoring."""
EVAL_SHARE = 16
"""One question in so many is an eval question, where one file serves both splits."""
TEMPLATE = "{question}\n\nReason step by step, then give the final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class Source:
    """Place of a question set, and the meaning of its columns."""

    hub: str
    folder: str | None = None
    """The hub's config: a folder of the repository."""
    train_split: str | None
    eval_split: str | None
    question: tuple[str, ...]
    """The first of these columns that exists: text, or a list of chat messages that is used as it is."""
    answer: tuple[str, ...]
    """The same for the reference; a dot goes into a struct."""
    index: str | None = None
    """Column that repeated questions share."""
    answer_mark: str | None = None
    """The reference is what follows this in the answer column."""


_AIME24 = Source(
    hub="Maxwell-Jia/AIME_2024",
    train_split=None,
    eval_split="train",
    question=("Problem", "problem"),
    answer=("Answer", "answer"),
)
_AIME25 = Source(
    hub="math-ai/aime25", train_split=None, eval_split="test", question=("problem", "question"), answer=("answer",)
)
SOURCES: Mapping[tuple[str, int | None], Source] = {
    ("gsm8k", None): Source(
        hub="openai/gsm8k",
        folder="main",
        train_split="train",
        eval_split="test",
        question=("question",),
        answer=("answer",),
        answer_mark="####",
    ),
    ("math500", None): Source(
        hub="HuggingFaceH4/MATH-500",
        train_split=None,
        eval_split="test",
        question=("problem",),
        answer=("answer",),
    ),
    ("dapo_math_17k", None): Source(
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        train_split="train",
        eval_split="train",
        question=("prompt",),
        answer=("reward_model.ground_truth",),
        index="extra_info.index",
    ),
    ("aime", 2024): _AIME24,
    ("aime", 2025): _AIME25,
    ("amc", None): Source(
        hub="math-ai/amc23",
        train_split=None,
        eval_split="test",
        question=("question", "problem"),
        answer=("answer",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """The options of every math task."""

    path: str | None = None
    """Local file or folder in place of the hub."""
    revision: str | None = None
    """Commit or tag of the hub repository."""
    year: int | None = None
    """aime only: 2024 (the default) or 2025."""
    train_split: str | None = None
    """In place of the source's own; "none" for no training questions."""
    eval_split: str | None = None
    template: str = TEMPLATE
    """`{question}` stands for the question. Not used where the data brings whole chat messages."""
    system: str | None = None
    """A system message before it."""
    chat: bool | None = None
    """Use the model's chat template; null: if it has one."""
    chat_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to the chat template, such as enable_thinking."""
    max_prompt_tokens: int | None = None
    """Questions with longer prompts are left out."""
    max_new_tokens: int = 1024
    num_workers: int | None = None
    """Grading processes; null: one per core, at most 8."""
    timeout_s: float = 3.0
    """CPU seconds per answer."""


@dataclass(frozen=True)
class Question:
    """One row: what is asked and what is right."""

    messages: tuple[Message, ...]
    reference: str
    key: str


@dataclass(frozen=True, kw_only=True, eq=False)
class MathTask(TextTask):
    """The task; owns its grading processes through `grader`."""

    name: str
    options: MathOptions
    questions: Mapping[Split, Sequence[Question]]
    tokens: TextTokenizer
    grader: MathGrader
    num_left_out: int = 0
    """Questions whose prompts are too long."""

    @property
    def num_train(self) -> int:
        return len(self.questions["train"])

    @property
    def num_eval(self) -> int:
        return len(self.questions["eval"])

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        """Raises ValueError for an index the split does not have."""
        questions = self.questions[split]
        if any(not 0 <= index < len(questions) for index in indices):
            raise ValueError(f"task {self.name!r} has {len(questions)} {split} questions: index {max(indices)} is none")
        return [
            Item(index, _prompt(self.tokens, q.messages, self.options), q.reference, q.key)
            for index, q in ((index, questions[index]) for index in indices)
        ]

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        texts = [response_text(self.tokens, response) for response in responses]
        return self.grader.grade([item.reference for item in items], texts)

    def content_hash(self) -> str:
        digest = hashlib.sha256(f"{self.name} {RULE}".encode())
        for split in ("train", "eval"):
            for q in self.questions[split]:
                digest.update(json.dumps([split, q.messages, q.reference]).encode())
        return digest.hexdigest()[:16]


def build_math(name: str, options: Mapping[str, Any], tokenizer_folder: Path | None) -> MathTask:
    """Read the questions of math task `name`. ValueError: a bad option, file, column or row, in one line."""
    check_options(name, options, [f for f in MathOptions.__dataclass_fields__ if f != "year" or name == "aime"])
    settings = _parse_options(name, options)
    if "{question}" not in settings.template:
        raise ValueError(f"task {name!r}: template={settings.template!r} has no {{question}}")
    key = (name, (settings.year or 2024) if name == "aime" else None)
    if key not in SOURCES:
        raise ValueError(f"task {name!r}: year={settings.year!r} is not one of 2024, 2025")
    tokens = load_text_tokenizer(tokenizer_folder, name, settings.chat)
    found = _load_splits(name, SOURCES[key], settings)
    num_left_out = 0
    if settings.max_prompt_tokens is not None:
        for split, questions in found.items():
            lengths = [len(_prompt(tokens, q.messages, settings)) for q in questions]
            kept = [q for q, n in zip(questions, lengths, strict=True) if n <= settings.max_prompt_tokens]
            num_left_out += len(questions) - len(kept)
            found[split] = kept
    if not any(found.values()):
        raise ValueError(f"task {name!r}: no question has at most max_prompt_tokens={settings.max_prompt_tokens}")
    grader = MathGrader(settings.num_workers, settings.timeout_s)
    return MathTask(
        name=name, options=settings, questions=found, tokens=tokens, grader=grader, num_left_out=num_left_out
    )


def _parse_options(name: str, options: Mapping[str, Any]) -> MathOptions:
    try:
        return TypeAdapter(MathOptions).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"task {name!r}: {where}={first['input']!r}: {first['msg'].lower()}") from error


def _prompt(tokens: TextTokenizer, messages: Sequence[Message], options: MathOptions) -> tuple[int, ...]:
    return prompt_ids(tokens, messages, **options.chat_options)


def _load_splits(name: str, source: Source, options: MathOptions) -> dict[Split, list[Question]]:
    wanted = {
        "train": options.train_split or source.train_split,
        "eval": options.eval_split or source.eval_split,
    }
    files = {
        split: find_files(name, source.hub, source.folder, stored, options.path, options.revision)
        for split, stored in wanted.items()
        if stored is not None and stored != "none"
    }
    read = {paths: list(_questions(paths, source, options)) for paths in set(files.values())}
    found: dict[Split, list[Question]] = {"train": [], "eval": []}
    if files.get("train") == files.get("eval"):
        for question in read[files["eval"]]:
            found["eval" if int(question.key, 16) % EVAL_SHARE == 0 else "train"].append(question)
    else:
        found["eval"] = read[files["eval"]] if "eval" in files else []
        held_out = {question.key for question in found["eval"]}
        trained = read[files["train"]] if "train" in files else []
        found["train"] = [question for question in trained if question.key not in held_out]
    return found


def _questions(paths: tuple[Path, ...], source: Source, options: MathOptions) -> Iterator[Question]:
    for place, row in read_rows(paths, {"question": source.question, "answer": source.answer}, source.index):
        asked, reference = row["question"], _reference(row["answer"], source.answer_mark)
        if not asked or reference is None:
            mark = f" after {source.answer_mark!r}" if source.answer_mark else ""
            raise ValueError(f"{place}: no {'question' if not asked else 'answer' + mark}")
        if isinstance(asked, str):
            text = asked
            messages = [{"role": "user", "content": options.template.replace("{question}", asked.strip())}]
        else:
            text = "\n\n".join(message["content"] for message in asked)
            messages = [{"role": message["role"], "content": message["content"]} for message in asked]
        if options.system is not None:
            messages = [{"role": "system", "content": options.system}, *messages]
        key = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()
        yield Question(tuple(messages), reference, key)


def _reference(value: Any, mark: str | None) -> str | None:
    """The answer column as text: 27.0 is 27; with a mark, what follows its last occurrence, without commas."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value).strip()
    if mark is not None:
        _, found, text = text.rpartition(mark)
        text = text.strip().replace(",", "") if found else ""
    return text or None
