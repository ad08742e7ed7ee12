"""The file of a run's responses: what a line holds, and what stays of it where a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.models.tokenizer import save_tokenizer
from harness.tasks import Item, Task, build_task
from harness.tasks.text_tokens import TextTask
from harness.trainers.rollout_file import Answer, RolloutFile
from tests.source_tree import ROOT


def answers(count: int, response: tuple[int, ...] = (5, 6, 1)) -> list[Answer]:
    """The first is right, the last one was cut."""
    return [
        Answer(
            item=Item(index=40 + i, prompt=(7, 8 + i), reference=f"r{i}", key=str(i)), response=response,
            reward=float(i == 0), is_parsable=i < 2, is_truncated=i == count - 1,
        )
        for i in range(count)
    ]  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def digits() -> Task:
    return build_task("chain", {"n": 4})


def test_a_line_is_a_response_in_the_order_of_the_batch(tmp_path: Path, digits: Task) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    file = RolloutFile(path, digits, 2, 0)
    file.append(0, answers(3))
    file.append(1, answers(1))  # a batch of fewer than are asked for
    assert read(path) == [
        {"step": 0, "row": 0, "index": 40, "reference": "r0", "reward": 1.0, "is_parsable": True,
         "is_truncated": False, "prompt_ids": [7, 8], "response_ids": [5, 6, 1]},
        {"step": 0, "row": 1, "index": 41, "reference": "r1", "reward": 0.0, "is_parsable": True,
         "is_truncated": False, "prompt_ids": [7, 9], "response_ids": [5, 6, 1]},
        {"step": 1, "row": 0, "index": 40, "reference": "r0", "reward": 1.0, "is_parsable": True,
         "is_truncated": True, "prompt_ids": [7, 8], "response_ids": [5, 6, 1]},
    ]  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_run_that_goes_on_writes_its_steps_once(tmp_path: Path, digits: Task, step: int) -> None:
    path = tmp_path / "run.jsonl"
    straight = RolloutFile(path, digits, 2, 0)
    for index in range(3):
        straight.append(index, answers(2))
    wanted = read(path)
    again = RolloutFile(path, digits, 2, step)
    assert read(path) == [row for row in wanted if row["step"] < step]
    for index in range(step, 3):
        again.append(index, answers(2))
    assert read(path) == wanted


def test_a_line_that_a_kill_cut_anywhere_is_dropped(tmp_path: Path) -> None:
    """Also behind a brace of the text, where it looks whole."""
    task = text_task(tmp_path)
    path = tmp_path / "run.jsonl"
    RolloutFile(path, task, 2, 0).append(0, answers(2, tuple(task.tokens.tokenizer.encode("{7} {8}").ids)))
    whole = path.read_text(encoding="utf-8")
    first, second = whole.splitlines()
    assert second.count("}") > 1
    for end in range(1, len(second)):
        path.write_text(f"{first}\n{second[:end]}", encoding="utf-8")
        RolloutFile(path, task, 2, 1)
        assert path.read_text(encoding="utf-8") == f"{first}\n"
    path.write_text(whole, encoding="utf-8")
    RolloutFile(path, task, 2, 1)
    assert path.read_text(encoding="utf-8") == whole


def text_task(folder: Path) -> TextTask:
    """Questions in text, read with the 128-character tokenizer."""
    save_tokenizer(folder, 128)
    (folder / "config.json").write_text('{"vocab_size": 128, "eos_token_id": 1}')
    data = ROOT / "tests" / "tasks" / "data" / "gsm8k"
    task = build_task("gsm8k", {"path": str(data), "num_workers": 1}, folder)
    assert isinstance(task, TextTask)
    return task


def test_a_task_in_text_has_its_prompts_and_responses_as_text(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    (item,) = task.sample("train", [0])
    response = [*task.tokens.tokenizer.encode("so 8").ids, task.eos_id]
    path = tmp_path / "run.jsonl"
    answer = Answer(item=item, response=response, reward=0.0, is_parsable=False, is_truncated=False)
    RolloutFile(path, task, 1, 0).append(0, [answer])
    (row,) = read(path)
    assert row["response"] == "so 8"
    assert task.tokens.tokenizer.encode(row["prompt"], add_special_tokens=False).ids == row["prompt_ids"]
    assert (row["prompt_ids"], row["response_ids"]) == (list(item.prompt), response)
