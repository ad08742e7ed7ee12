"""Ids that end a response, from a model folder's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.models.tokenizer import save_tokenizer
from harness.tasks import build_task, stop_ids
from harness.tasks.text_tokens import TextOptions, load_text_tokenizer


def folder(path: Path, generation: Any = None, config: Any = 1) -> Path:
    """A folder whose tokenizer ends at 1; `generation` and `config`: the ids in the two files, None for no key."""
    save_tokenizer(path, 128)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": 128} | ({} if config is None else {"eos_token_id": config}))
    )
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return path


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 1, ()),
        (1, 1, ()),
        ([1, 9, 5], 1, (5, 9)),
        ([9], 1, (9,)),  # the tokenizer's own id ends a response, too
        (None, [1, 7], (7,)),
        ([5], [1, 7], (5,)),  # generation_config.json decides where it says any
        (None, None, ()),
        ([9, 9], None, (9,)),
    ],
)
def test_ids_of_the_folder_that_end_beside_the_tokenizers(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    tokens = load_text_tokenizer(folder(tmp_path, generation, config), "gsm8k", TextOptions())
    assert (tokens.eos_id, tokens.stop_ids) == (1, expected)


@pytest.mark.parametrize("wrong", ["</s>", [1, -2], [True], [[1]], 1.0])
def test_what_is_no_id_names_the_file(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id=.*; valid: a token id, or a list"
    ) as e:
        load_text_tokenizer(folder(tmp_path, wrong), "gsm8k", TextOptions())
    assert "\n" not in str(e.value)


def test_tasks_made_here_have_one() -> None:
    assert stop_ids(build_task("chain", {"n": 4})) == ()
