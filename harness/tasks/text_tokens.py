"""Prompts and responses of text tasks as token ids, by the tokenizer of a Hugging Face model folder.

`tokenizers` reads tokenizer.json; transformers is imported only where the folder brings a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.foundation.json_object import read_json_object

Message = Mapping[str, str]
"""{"role": ..., "content": ...}"""


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer as a text task needs it."""

    tokenizer: Any
    """A `tokenizers.Tokenizer`."""
    chat: Any
    """A transformers tokenizer whose chat template makes the prompt; None: the contents, joined, are the prompt."""
    eos_id: int
    pad_id: int
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    """Ids that end a response beside `eos_id`, ascending."""


class Limited(Protocol):
    """Options of a text task that bound its responses."""

    @property
    def max_new_tokens(self) -> int: ...


class TextTask:
    """Options and tokenizer of every text task. A base of frozen dataclasses, without state."""

    options: Limited
    tokens: TextTokenizer

    @property
    def max_new_tokens(self) -> int:
        return self.options.max_new_tokens

    @property
    def eos_id(self) -> int:
        return self.tokens.eos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokens.stop_ids

    @property
    def pad_id(self) -> int:
        return self.tokens.pad_id

    @property
    def vocab_size(self) -> int:
        return self.tokens.vocab_size


def load_text_tokenizer(folder: Path | None, task: str, has_chat: bool | None = None) -> TextTokenizer:
    """Read `folder`. `has_chat` None: use the chat template if there is one. ValueError names the missing piece."""
    from tokenizers import Tokenizer

    if folder is None:
        raise ValueError(f"task {task!r} needs a model folder with a tokenizer: set model=hf model.path=FOLDER")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: task {task!r} needs the tokenizer of the model folder")
    if "model" not in _read_json(path):  # the library's own error for this is a bare Exception
        raise ValueError(f"{path} is not a tokenizer file: it has no 'model'")
    tokenizer = Tokenizer.from_file(str(path))
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    has_template = bool(settings.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    if has_chat and not has_template:
        raise ValueError(f"task {task!r}: chat=true, but {folder} has no chat template")
    eos_id = _special_id(tokenizer, settings, config, "eos")
    if eos_id is None:
        raise ValueError(f"{folder} names no end-of-sequence token (eos_token in tokenizer_config.json)")
    pad_id = _special_id(tokenizer, settings, config, "pad")
    size = int(config.get("vocab_size") or tokenizer.get_vocab_size())
    chat = _load_chat(folder, task) if has_template and has_chat is not False else None
    stops = tuple(sorted(_end_ids(folder, config) - {eos_id}))
    return TextTokenizer(tokenizer, chat, eos_id, eos_id if pad_id is None else pad_id, size, stops)


def prompt_ids(tokens: TextTokenizer, messages: Sequence[Message], **chat_options: Any) -> tuple[int, ...]:
    """Token ids of a prompt, ready for the response to follow."""
    if tokens.chat is None:
        return tuple(tokens.tokenizer.encode("\n\n".join(message["content"] for message in messages)).ids)
    text = tokens.chat.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **chat_options
    )
    return tuple(tokens.tokenizer.encode(text, add_special_tokens=False).ids)  # the template brings its own


def response_text(tokens: TextTokenizer, response: Sequence[int]) -> str:
    """Text of a response without special tokens."""
    return tokens.tokenizer.decode(list(response), skip_special_tokens=True)


def _load_chat(folder: Path, task: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"task {task!r}: the chat template of {folder} needs transformers, or chat=false") from error
    return AutoTokenizer.from_pretrained(folder)


def _special_id(tokenizer: Any, settings: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> int | None:
    token = settings.get(f"{kind}_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(token) if token else None
    if found is None:
        found = config.get(f"{kind}_token_id")
        found = found[0] if isinstance(found, list) else found
    return found


def _end_ids(folder: Path, config: Mapping[str, Any]) -> set[int]:
    """Every `eos_token_id` of generation_config.json, else of config.json, as transformers and vLLM stop at them.

    Raises ValueError for anything but ids."""
    path = folder / "generation_config.json"
    found = _read_json(path).get("eos_token_id")
    path, found = (path, found) if found is not None else (folder / "config.json", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if wrong := [value for value in ids if not isinstance(value, int) or isinstance(value, bool) or value < 0]:
        raise ValueError(f"{path}: eos_token_id={wrong[0]!r}; valid: a token id, or a list of them")
    return set(ids)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
