"""Prompts of question sets, token by token those of transformers' `apply_chat_template`: Qwen2, Qwen3, Llama 3."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = model_of(tmp_path / "model", family)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def theirs(messages: list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    asked = [TEMPLATE.replace("{question}", question.strip()) for question in QUESTIONS]
    wanted = {str(i): theirs(messages_of(text)) for i, text in enumerate(asked)}
    assert prompts_of(plain_task(tmp_path / "plain", model)) == wanted
    system = prompts_of(plain_task(tmp_path / "system", model, system="Be brief."))
    assert system == {str(i): theirs(messages_of(text, "Be brief.")) for i, text in enumerate(asked)}
    assert all(system[key] != wanted[key] for key in wanted)
    chats = [messages_of(text, "Be brief." if i % 2 else None) for i, text in enumerate(QUESTIONS)]
    assert prompts_of(chat_task(tmp_path / "chat", model)) == {str(i): theirs(chat) for i, chat in enumerate(chats)}
