"""Questions whose prompts are held against other libraries': folders of three families, and data in three forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.published.recipes.twin import write_model
from harness.tasks import build_task
from harness.tasks.math_data import MathTask

FAMILIES = {"qwen2": "qwen2.5", "qwen3": "qwen3", "llama": "llama3"}
"""Family of a model -> the chat template that such models bring."""
TEMPLATE = "{question}\nThink step by step, and end with \\boxed{}."
QUESTIONS = (
    "  What is 12 - 5?  ", "Line one\n\n  line two\ttab\n", "<|im_end|> and <|eot_id|> in a question",
    "ünï ≤ 3 €, 数学", "{question} in braces", "x" * 40, "A 'quote' and a \\frac{1}{2}", "3.14 1,000 10%", "?",
    "a\r\nb",
)  # fmt: skip
"""Turns that are easily spoilt: white space at the ends, special tokens, other alphabets, the template's own word."""


def model_of(folder: Path, family: str) -> Path:
    """A model folder of a family, with its chat template."""
    write_model(folder, family, FAMILIES[family])
    return folder


def plain_task(folder: Path, model: Path, **options: Any) -> MathTask:
    """The questions in GSM8K's columns."""
    rows = [{"question": asked, "answer": f"so #### {i}"} for i, asked in enumerate(QUESTIONS)]
    return _task("gsm8k", folder, rows, model, template=TEMPLATE, **options)


def chat_task(folder: Path, model: Path) -> MathTask:
    """The questions as whole conversations, in DAPO's columns."""
    rows = [
        {"prompt": messages_of(asked, "Be brief." if i % 2 else None), "reward_model": {"ground_truth": str(i)}}
        for i, asked in enumerate(QUESTIONS)
    ]
    return _task("dapo_math_17k", folder, rows, model)


def _task(name: str, folder: Path, rows: Sequence[dict[str, Any]], model: Path, **options: Any) -> MathTask:
    folder.mkdir(parents=True)
    files = {"train": rows, "test": rows[:1]} if name == "gsm8k" else {"train": rows}
    for split, some in files.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    task = build_task(name, {"path": str(folder), "num_workers": 1, **options}, model)
    assert isinstance(task, MathTask)
    return task


def messages_of(asked: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation of one question."""
    turn = {"role": "user", "content": asked}
    return [turn] if system is None else [{"role": "system", "content": system}, turn]


def prompts_of(task: MathTask) -> dict[str, tuple[int, ...]]:
    """Reference -> prompt of every question of both splits."""
    counts = {"train": task.num_train or 0, "eval": task.num_eval}
    items = [item for split, count in counts.items() for item in task.sample(split, list(range(count)))]
    return {item.reference: tuple(item.prompt) for item in items}
