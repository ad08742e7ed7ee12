"""Tasks by name: an embedded task and the tokenizer of the model that it is asked of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.models.tokenizer import save_tokenizer, save_words
from harness.tasks import build_task, longest_response
from harness.tasks.wordmath import Wordmath


def refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        build_task(name, {}, folder)
    assert str(error.value) == (
        f"task {name!r} is written in token ids of models that are trained here, and {folder / 'tokenizer.json'} has "
        "other tokens; name the model's own task, or one in text, e.g. task=gsm8k task.path=FOLDER"
    )


@pytest.mark.parametrize("vocabulary", [{"!": 0, '"': 1, "#": 2}, [["<pad>", 0.0], ["<eos>", 0.0]]])
def test_an_embedded_task_refuses_a_folder_with_other_tokens(tmp_path: Path, vocabulary: object) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    for name in ("sort", "chain", "wordmath"):
        refused(name, tmp_path)


def test_characters_and_words_are_not_taken_for_each_other(tmp_path: Path) -> None:
    chars, words = tmp_path / "chars", tmp_path / "words"
    chars.mkdir()
    words.mkdir()
    save_tokenizer(chars, 128)
    save_words(words, Wordmath(vocab_size=160, layout="ordered").words)
    assert build_task("sort", {}, chars).vocab_size == 32
    assert build_task("wordmath", {}, words).vocab_size == 512, "the words of a small vocabulary come first in a large"
    refused("sort", words)
    refused("wordmath", chars)


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\n", "null"])
def test_a_damaged_tokenizer_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json (is not valid JSON|holds no JSON object)"):
        build_task("sort", {}, tmp_path)


def test_a_task_for_timing_and_a_folder_without_tokenizer_are_not_checked(tmp_path: Path) -> None:
    assert build_task("sort", {}, tmp_path).name == "sort"
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"!": 0}}}', encoding="utf-8")
    assert build_task("count", {}, tmp_path).name == "count"


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("sort", {"n": 16}, 17), ("count", {"max_new_tokens": 5}, 5), ("gsm8k", {}, 1024),
        ("gsm8k", {"max_new_tokens": 7}, 7), ("reasoning_gym:leg_counting", {}, 512),
    ],
)  # fmt: skip
def test_the_longest_response_without_data(name: str, options: dict[str, int], tokens: int) -> None:
    assert longest_response(name, options) == tokens


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {"max_new_tokens": "x"}, "^task 'gsm8k': max_new_tokens='x': input should be a valid integer"),
        ("reasoning_gym:leg_counting", {"max_new_tokens": 0}, "max_new_tokens=0: input should be greater than 0$"),
        ("gsm", {}, "^task 'gsm' is unknown: nearest: gsm8k; valid: sort"),
    ],
)
def test_a_longest_response_that_is_none(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longest_response(name, options)
