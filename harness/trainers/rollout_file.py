"""The file of a run's responses, where `launch.dump_rollouts` asks for them.

One JSON object a line: step, row, index of the question, prompt and response as token ids and, where the task reads
text, as text, reference, reward, `is_parsable`, `is_truncated`. A run that resumes drops the lines of the steps it
takes again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from harness.foundation.whole_file import write_atomic
from harness.tasks import Item, Task
from harness.tasks.text_tokens import TextTask, response_text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sampled response, and what it scored."""

    item: Item
    response: Sequence[int]
    reward: float
    is_parsable: bool
    is_truncated: bool


class RolloutFile:
    """Owns the file: `num_rows` responses of every step, in the order of the batch."""

    def __init__(self, path: Path, task: Task, num_rows: int, step: int) -> None:
        """Go on from `step`: only whole lines of the steps before it stay."""
        self.path, self.num_rows = path, num_rows
        self.tokens = task.tokens if isinstance(task, TextTask) else None
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _is_before(line, step)]
            write_atomic(path, "".join(f"{line}\n" for line in kept).encode())

    def append(self, step: int, answers: Iterable[Answer]) -> None:
        """Write the first responses of a step's batch."""
        rows = [self._values(step, row, answer) for row, answer in enumerate(islice(answers, self.num_rows))]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def _values(self, step: int, row: int, a: Answer) -> dict[str, Any]:
        values: dict[str, Any] = {"step": step, "row": row, "index": a.item.index, "reference": a.item.reference}
        if self.tokens is not None:
            prompt = self.tokens.tokenizer.decode(list(a.item.prompt), skip_special_tokens=False)
            values |= {"prompt": prompt, "response": response_text(self.tokens, a.response)}
        values |= {"reward": a.reward, "is_parsable": a.is_parsable, "is_truncated": a.is_truncated}
        return values | {"prompt_ids": list(a.item.prompt), "response_ids": list(a.response)}


def _is_before(line: str, step: int) -> bool:
    """Is this a whole line of a step before `step`? A kill may have cut it anywhere."""
    try:
        return int(json.loads(line)["step"]) < step
    except ValueError:
        return False
