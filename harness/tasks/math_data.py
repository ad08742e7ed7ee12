r"""Mathematical question sets in the columns their publishers use, from the Hugging Face hub or from local files.

| task | hub | columns read | splits: train, eval |
| --- | --- | --- | --- |
| gsm8k | openai/gsm8k, config main | question, answer (after `####`) | train, test |
| math | DigitalLearningGmbH/MATH-lighteval | problem, answer or solution (last box) | train, test |
| math500 | HuggingFaceH4/MATH-500 | problem, answer | none, test |
| dapo_math_17k | BytedTsinghua-SIA/DAPO-Math-17k | prompt, reward_model | one, by content |
| deepmath | zwhe99/DeepMath-103K | question, final_answer | one, by content |
| bigmath | open-r1/Big-Math-RL-Verified-Processed | prompt or problem, solution or answer | one, by content |
| deepscaler | agentica-org/DeepScaleR-Preview-Dataset | problem, answer | one, by content |
| aime (year 2024) | Maxwell-Jia/AIME_2024 | Problem, Answer | none, train |
| aime (year 2025) | math-ai/aime25 | problem, answer | none, test |
| amc | math-ai/amc23 | question, answer | none, test |

Files are parquet, JSON lines or a JSON list. `columns` names other columns, as of a file in verl's form:
`{question: prompt, answer: reward_model.ground_truth}`.
Of equal training questions the first is kept, whatever its index, and none that is an evaluation question. Evaluation
sets are asked as published, row by row, but where a source holds its whole set several times (`is_repeated`), as
DAPO-Math-17k does a hundred times: there, too, the first of equal questions is kept.
Where one file serves both splits, the hash of a question's text decides its side, so the splits never share one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt

from harness.tasks.contract import Item, Score, Split
from harness.tasks.data_files import find_files, read_rows
from harness.tasks.math_reward import MathGrader, Rule, last_boxed
from harness.tasks.text_tokens import (
    Message,
    TextOptions,
    TextTask,
    TextTokenizer,
    load_text_tokenizer,
    parse_options,
    prompt_ids,
    response_text,
)

RULE = 2
"""Version of the prompts and the scoring."""
EVAL_SHARE = 16
"""One question in so many is an eval question, where one file serves both splits."""
NonEmpty = Annotated[str, Field(min_length=1)]
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
    is_repeated: bool = False
    """Its files hold the whole set several times: also of equal evaluation questions the first counts."""
    is_boxed: bool = False
    """The reference is the last box of the answer column, where there is one."""
    answer_mark: str | None = None
    """The reference is what follows this in the answer column."""


_AIME24 = Source(
    hub="Maxwell-Jia/AIME_2024",
    train_split=None,
    eval_split="train",
    question=("Problem", "problem"),
    answer=("Answer", "answer"),
    is_repeated=True,
)
_AIME25 = Source(
    hub="math-ai/aime25", train_split=None, eval_split="test", question=("problem", "question"), answer=("answer",),
    is_repeated=True,
)  # fmt: skip
SOURCES: Mapping[tuple[str, int | None], Source] = {
    ("gsm8k", None): Source(
        hub="openai/gsm8k",
        folder="main",
        train_split="train",
        eval_split="test",
        question=("question",),
        answer=("answer",),
        is_repeated=True,  # the publisher's folder has train_socratic.jsonl beside train.jsonl
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
        is_repeated=True,
    ),
    ("math", None): Source(
        hub="DigitalLearningGmbH/MATH-lighteval",
        train_split="train",
        eval_split="test",
        question=("problem",),
        answer=("answer", "solution"),
        is_boxed=True,
    ),
    ("deepmath", None): Source(
        hub="zwhe99/DeepMath-103K",
        train_split="train",
        eval_split="train",
        question=("question",),
        answer=("final_answer",),
        is_repeated=True,
    ),
    ("bigmath", None): Source(
        hub="open-r1/Big-Math-RL-Verified-Processed",
        folder="level_3_4_5",
        train_split="train",
        eval_split="train",
        question=("prompt", "problem"),
        answer=("solution", "answer"),
        is_repeated=True,
        is_boxed=True,
    ),
    ("deepscaler", None): Source(
        hub="agentica-org/DeepScaleR-Preview-Dataset",
        train_split="train",
        eval_split="train",
        question=("problem",),
        answer=("answer",),
        is_repeated=True,
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
class Columns:
    """Columns of a file in place of the source's own; a dot goes into a struct."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    question: NonEmpty | None = None
    answer: NonEmpty | None = None


@dataclass(frozen=True, kw_only=True)
class MathOptions(TextOptions):
    """The options of every math task."""

    template: str = TEMPLATE
    path: NonEmpty | None = None
    """Local file or folder in place of the hub."""
    revision: NonEmpty | None = None
    """Commit or tag of the hub repository; not with `path`."""
    year: int | None = None
    """aime only: 2024 (the default) or 2025."""
    subset: NonEmpty | None = None
    """The hub's config in place of the source's own: a folder of the repository."""
    columns: Columns = Columns()
    """{question: NAME, answer: NAME}: columns in place of the source's own."""
    rule: Rule = "own"
    """Reading and comparison of an answer."""
    stop: tuple[NonEmpty, ...] = ()
    """Texts that end a response, as an EOS does: what follows is neither trained on nor scored."""
    train_split: NonEmpty | None = None
    """In place of the source's own; "none" for no training questions."""
    eval_split: NonEmpty | None = None
    max_prompt_tokens: PositiveInt | None = None
    """Questions with longer prompts are left out."""
    num_workers: PositiveInt | None = None
    """Grading processes; null: one per core, at most 8."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
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

    @property
    def num_train(self) -> int:
        return len(self.questions["train"])

    @property
    def num_eval(self) -> int:
        return len(self.questions["eval"])

    def sample(self, split: Split, indices: Sequence[int]) -> list[Item]:
        """Raises ValueError for an index the split does not have."""
        questions = self.questions[split]
        if wrong := [index for index in indices if not 0 <= index < len(questions)]:
            raise ValueError(f"task {self.name!r} has {len(questions)} {split} questions: index {wrong[0]} is none")
        asked = [(index, questions[index]) for index in indices]
        return [Item(i, prompt_ids(self.tokens, q.messages, self.options.chat_options), q.reference, q.key)
                for i, q in asked]  # fmt: skip

    def score(self, items: Sequence[Item], responses: Sequence[Sequence[int]]) -> list[Score]:
        texts = [_until(response_text(self.tokens, response), self.options.stop) for response in responses]
        return self.grader.grade([item.reference for item in items], texts)

    def num_kept(self, response: Sequence[int]) -> int:
        """Tokens up to the first with which the text contains one of `options.stop`; all without one."""
        stop = self.options.stop
        if not any(text in response_text(self.tokens, response) for text in stop):
            return len(response)
        return 1 + bisect_left(
            range(1, len(response) + 1), True,
            key=lambda count: any(text in response_text(self.tokens, response[:count]) for text in stop),
        )  # fmt: skip

    def content_hash(self) -> str:
        digest = hashlib.sha256(f"{self.name} {RULE}".encode())
        if self.options.rule != "own" or self.options.stop:
            digest.update(json.dumps([self.options.rule, self.options.stop]).encode())
        for split in ("train", "eval"):
            for q in self.questions[split]:
                digest.update(json.dumps([split, q.messages, q.reference]).encode())
        return digest.hexdigest()[:16]


def build_math(name: str, options: Mapping[str, Any], tokenizer_folder: Path | None) -> MathTask:
    """Read the questions of math task `name`. ValueError: a bad option, file, column or row, in one line."""
    settings = math_options(name, options)
    key = (name, (settings.year or 2024) if name == "aime" else None)
    if key not in SOURCES:
        raise ValueError(f"task {name!r}: year={settings.year!r} is not one of 2024, 2025")
    tokens = load_text_tokenizer(tokenizer_folder, name, settings)
    source, columns = SOURCES[key], settings.columns
    source = replace(
        source, folder=settings.subset or source.folder,
        question=source.question if columns.question is None else (columns.question,),
        answer=source.answer if columns.answer is None else (columns.answer,),
        answer_mark=source.answer_mark if columns.answer is None else None,
    )  # fmt: skip
    found = _load_splits(name, source, settings)
    if settings.max_prompt_tokens is not None:
        for split, questions in found.items():
            lengths = [len(prompt_ids(tokens, q.messages, settings.chat_options)) for q in questions]
            found[split] = [q for q, n in zip(questions, lengths, strict=True) if n <= settings.max_prompt_tokens]
    if not any(found.values()):
        most = settings.max_prompt_tokens
        where = f"is in {settings.path or source.hub}" if most is None else f"has at most max_prompt_tokens={most}"
        raise ValueError(f"task {name!r}: no question {where}")
    grader = MathGrader(settings.num_workers, settings.timeout_s, settings.rule)
    return MathTask(name=name, options=settings, questions=found, tokens=tokens, grader=grader)


def math_options(name: str, options: Mapping[str, Any]) -> MathOptions:
    """The options of math task `name`. Raises ValueError for an unknown one, a wrong value, or one without effect."""
    known = [option for option in MathOptions.__dataclass_fields__ if option != "year" or name == "aime"]
    found = parse_options(name, MathOptions, options, known)
    if found.path is not None and found.revision is not None:
        raise ValueError(f"task {name!r}: revision={found.revision!r} is of the hub's copy, but path names a local one")
    if found.path is not None and found.subset is not None:
        folder = Path(found.path).expanduser() / found.subset
        if not folder.is_dir():
            raise ValueError(f"task {name!r}: subset={found.subset!r}: there is no folder {folder}")
    return found


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
    if not files:
        raise ValueError(f"task {name!r}: train_split and eval_split leave it no question")
    read = {
        paths: list(_questions(paths, source, options, is_once=source.is_repeated or paths == files.get("train")))
        for paths in dict.fromkeys(files.values())
    }
    trained, evaluated = (read[files[split]] if split in files else [] for split in ("train", "eval"))
    if files.get("train") == files.get("eval"):
        evaluated = [question for question in evaluated if int(question.key, 16) % EVAL_SHARE == 0]
    held_out = {question.key for question in evaluated}
    return {"train": [question for question in trained if question.key not in held_out], "eval": evaluated}


def _questions(paths: tuple[Path, ...], source: Source, options: MathOptions, *, is_once: bool) -> Iterator[Question]:
    columns = {"question": source.question, "answer": source.answer}
    for place, row in read_rows(paths, columns, "question" if is_once else None):
        asked = _asked(row["question"], place)
        if not (reference := _reference(row["answer"], source, place)):
            raise ValueError(f"{place}: no answer" + (f" after {source.answer_mark!r}" if source.answer_mark else ""))
        text = asked if isinstance(asked, str) else "\n\n".join(message["content"] for message in asked)
        if not text.strip():
            raise ValueError(f"{place}: no question")
        key = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).hexdigest()
        yield Question(options.messages(asked), reference, key)


def _asked(value: Any, place: str) -> str | list[dict[str, str]]:
    """The question column: text without blanks around it, or the roles and contents of its chat messages."""
    if value is None or isinstance(value, str):
        return (value or "").strip()
    try:
        messages = [{"role": message["role"], "content": message["content"]} for message in value]
    except (TypeError, KeyError):
        messages = None
    if messages is None or not all(isinstance(text, str) for message in messages for text in message.values()):
        raise ValueError(f"{place}: the question is neither text nor a list of chat messages")
    return messages


def _until(text: str, stops: Sequence[str]) -> str:
    """Text up to the first of `stops`, which belongs to it."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _reference(value: Any, source: Source, place: str) -> str:
    """The answer column as text: 27.0 is 27; with a mark, what follows its last occurrence, without commas; the content
    of the last box, where the source says so and there is one. Empty where there is no answer."""
    mark = source.answer_mark
    if isinstance(value, bool) or not isinstance(value, str | Number | None) or value != value:
        raise ValueError(f"{place}: the answer is neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value).strip()
    if mark is not None:
        _, found, text = text.rpartition(mark)
        text = text.strip().replace(",", "") if found else ""
    if source.is_boxed and (box := last_boxed(text)) is not None:
        text = box.strip()
    return text
