"""Prompts of question sets, token by token those of verl's own data set: Qwen2, Qwen3, Llama 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.tasks.math_data import MathTask
from tests.tasks.prompt_cases import (
    FAMILIES,
    QUESTIONS,
    TEMPLATE,
    chat_task,
    messages_of,
    model_of,
    plain_task,
    prompts_of,
)

pytestmark = pytest.mark.verl


@pytest.mark.parametrize("kind", ["plain", "chat"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_verls_data_set(family: str, kind: str, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", family)
    if kind == "plain":
        chats = [messages_of(TEMPLATE.replace("{question}", question.strip())) for question in QUESTIONS]
        task: MathTask = plain_task(tmp_path / "data", model)
    else:
        chats = [messages_of(question, "Be brief." if i % 2 else None) for i, question in enumerate(QUESTIONS)]
        task = chat_task(tmp_path / "data", model)
    rows = [{"prompt": chat, "reward_model": {"ground_truth": str(i)}} for i, chat in enumerate(chats)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "questions.parquet")
    ours = prompts_of(task)
    assert verls(tmp_path, model, max(map(len, ours.values()))) == ours
    left = verls(tmp_path, model, 40)
    assert left == {key: ids for key, ids in ours.items() if len(ids) <= 40} and len(left) < len(ours)


def verls(folder: Path, model: Path, longest: int) -> dict[str, tuple[int, ...]]:
    """Reference -> prompt as verl's rollout gets it, longer ones left out by its data set."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer.chat_template import apply_chat_template

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    config = OmegaConf.create({"max_prompt_length": longest, "filter_overlong_prompts": True, "cache_dir": str(folder),
                               "filter_overlong_prompts_workers": 1, "prompt_key": "prompt"})  # fmt: skip
    rows = RLHFDataset(str(folder / "questions.parquet"), tokenizer, config)
    found = [rows[i] for i in range(len(rows))]
    return {row["reward_model"]["ground_truth"]: tuple(apply_chat_template(tokenizer, list(row["raw_prompt"])))
            for row in found}  # fmt: skip
