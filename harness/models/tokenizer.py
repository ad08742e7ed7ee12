"""A character tokenizer for the embedded models: one token per character, as many tokens as the vocabulary.

The folder that `save_tokenizer` writes is read unchanged by transformers, vLLM and verl; `encode` and `decode` are
the same mapping in plain Python for the hot path. Left out: text outside the alphabet (an error here; transformers
drops it).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<bos>")
"""By id. Nothing else in the vocabulary is longer than one character."""
ALPHABET = "=+-*,\n 0123456789()/%.:;?<>ab"
"""Ids from 3 on: '=' 3, operators and separator 4-7, newline 8, space 9, digits 10-19."""
DIGIT_0_ID = 10
SIZES = (32, 128)
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompt is the concatenated content: nothing is added around it, with or without a generation prompt."""


@dataclass(frozen=True)
class CharTokenizer:
    """The two directions of the mapping; `len()` is the vocabulary size."""

    tokens: tuple[str, ...]
    """Token text by id."""
    ids: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; the special tokens are read as such. ValueError names a character it has not."""
        if "<" not in text:
            return [self._id(char) for char in text]
        found, position = [], 0
        while position < len(text):
            token = next((s for s in SPECIAL if text.startswith(s, position)), text[position])
            found.append(self._id(token))
            position += len(token)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included, so that `encode(decode(ids)) == ids`."""
        return "".join(map(self.tokens.__getitem__, ids))

    def _id(self, token: str) -> int:
        if token not in self.ids:
            raise ValueError(f"character {token!r} is not in the {len(self)}-token vocabulary")
        return self.ids[token]


@cache
def char_tokenizer(size: int = 32) -> CharTokenizer:
    """The tokenizer of 32 tokens, or the one of 128 whose first 32 are the same (for kernels that want multiples
    of 128): then printable ASCII, then Latin-1 letters to fill. ValueError for another size."""
    if size not in SIZES:
        raise ValueError(f"vocab_size {size} has no character tokenizer: choose one of {', '.join(map(str, SIZES))}")
    more = [chr(code) for code in (*range(0x20, 0x7F), *range(0xC0, 0x100))]
    chars = [*ALPHABET, *(char for char in more if char not in ALPHABET)]
    tokens = (*SPECIAL, *chars[: size - len(SPECIAL)])
    assert len(tokens) == len(set(tokens)) == size
    return CharTokenizer(tokens, {token: index for index, token in enumerate(tokens)})


def encode(text: str, size: int = 32) -> list[int]:
    """Ids of `text` under `char_tokenizer(size)`."""
    return char_tokenizer(size).encode(text)


def decode(ids: Iterable[int], size: int = 32) -> str:
    """Text of `ids` under `char_tokenizer(size)`, special tokens included."""
    return char_tokenizer(size).decode(ids)


def save_tokenizer(folder: Path, size: int = 32) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into the existing `folder`."""
    _save(folder, _tokenizer_json(size))


def save_numbered(folder: Path, size: int) -> None:
    """The files of `save_tokenizer` for a vocabulary of any size, whose tokens are words with their number: for models
    that are timed."""
    save_words(folder, (*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), size))))


def save_words(folder: Path, words: Sequence[str]) -> None:
    """The files of `save_tokenizer` for words between spaces, by id; the first three must be SPECIAL."""
    assert tuple(words[: len(SPECIAL)]) == SPECIAL
    vocab = {word: i for i, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": SPECIAL[PAD_ID]}
    splitter = {"type": "WhitespaceSplit"}
    _save(folder, _tokenizer_json(32) | {"model": model, "pre_tokenizer": splitter, "decoder": None})


def _save(folder: Path, tokenizer: dict[str, Any]) -> None:
    special = {"pad_token": SPECIAL[PAD_ID], "eos_token": SPECIAL[EOS_ID], "bos_token": SPECIAL[BOS_ID]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "added_tokens_decoder": {str(token.pop("id")): token for token in _added_tokens()},
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "padding_side": "left",
    }
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _added_tokens() -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL)]


def _tokenizer_json(size: int) -> dict[str, Any]:
    """The `tokenizers` file format 1.0: BPE without merges splits into characters, `Fuse` joins without spaces."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(char_tokenizer(size).ids),
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
