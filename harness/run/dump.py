"""Responses of a run written out step by step, where `launch.dump_rollouts` asks for them.

One JSON object a line: step, row, index of the question, prompt and response as token ids and, where the task reads
text, as text, reference, reward, `is_parsable`, `is_truncated`. A run that resumes drops the lines of the steps it
takes again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.config.load import run_id
from harness.config.schema import Launch
from harness.records.paths import rollouts_path
from harness.run.run import Collected, Run
from harness.tasks.text_tokens import TextTask, response_text


def dump(launch: Launch, run: Run) -> Callable[[int, Collected], None] | None:
    """A function that appends a step's batch to the run's file; None where nothing is asked for."""
    if not launch.dump_rollouts:
        return None
    path = rollouts_path(launch.results, launch.sweep, run_id(run.config))
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_from(path, run.step)

    def append(step: int, batch: Collected) -> None:
        lines = [json.dumps(row) for row in rows(run, step, batch)[: launch.dump_rollouts]]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    return append


def rows(run: Run, step: int, batch: Collected) -> list[dict[str, Any]]:
    """The responses of a batch as plain values, in order."""
    tokens = run.task.tokens if isinstance(run.task, TextTask) else None
    found: list[dict[str, Any]] = []
    responses, truncated = batch.rollout.responses(), batch.rollout.truncated.tolist()
    for row, (item, score, response) in enumerate(zip(batch.items, batch.scores, responses, strict=True)):
        values: dict[str, Any] = {"step": step, "row": row, "index": item.index, "reference": item.reference}
        if tokens is not None:
            texts = {"prompt": tokens.tokenizer.decode(list(item.prompt), skip_special_tokens=False)}
            values |= texts | {"response": response_text(tokens, response)}
        values |= {"reward": score.reward, "is_parsable": score.is_parsable, "is_truncated": bool(truncated[row])}
        found.append(values | {"prompt_ids": list(item.prompt), "response_ids": response})
    return found


def _drop_from(path: Path, step: int) -> None:
    """Leave only the whole lines of the steps before `step`."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < step]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
