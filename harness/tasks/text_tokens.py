"""Options, prompts and responses of text tasks: text as token ids, by the tokenizer of a Hugging Face model folder.

`tokenizers` reads tokenizer.json; transformers is imported only where the folder brings a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import PositiveInt, TypeAdapter, ValidationError

from harness.foundation.json_object import read_json_object
from harness.tasks.contract import check_options

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


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options that every text task has: the prompt around a question, and the longest response."""

    template: str = "{question}"
    """`{question}` stands for the question. Not used where the data brings whole chat messages."""
    system: str | None = None
    """A system message before it."""
    chat: bool | None = None
    """Use the model's chat template; null: if it has one."""
    chat_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to the chat template, such as enable_thinking."""
    max_new_tokens: PositiveInt = 1024

    def messages(self, question: str | Sequence[Message]) -> tuple[Message, ...]:
        """A question as chat messages: text in the template, messages as they are; before them the system message."""
        if isinstance(question, str):
            question = [{"role": "user", "content": self.template.replace("{question}", question)}]
        return (*([] if self.system is None else [{"role": "system", "content": self.system}]), *question)


Options = TypeVar("Options", bound=TextOptions)


def parse_options(name: str, kind: type[Options], values: Mapping[str, Any], known: Sequence[str]) -> Options:
    """The options of text task `name`, which has those in `known`. Raises ValueError, one line, for another one or a
    wrong value."""
    check_options(name, values, known)
    try:
        options = TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"task {name!r}: {where}={first['input']!r}: {first['msg'].lower()}") from error
    if "{question}" not in options.template:
        raise ValueError(f"task {name!r}: template={options.template!r} has no {{question}}")
    return options


class TextTask:
    """Options and tokenizer of every text task. A base of frozen dataclasses, without state."""

    options: TextOptions
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


def load_text_tokenizer(folder: Path | None, task: str, options: TextOptions) -> TextTokenizer:
    """Read `folder`. Raises ValueError naming the file that is missing or damaged, or the option that has no use."""
    from tokenizers import Tokenizer

    if folder is None:
        raise ValueError(f"task {task!r} needs a model folder with a tokenizer: set model=hf model.path=FOLDER")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: task {task!r} needs the tokenizer of the model folder")
    read_json_object(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer file: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    has_template = bool(settings.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    if options.chat and not has_template:
        raise ValueError(f"task {task!r}: chat=true, but {folder} has no chat template")
    use_chat = has_template and options.chat is not False
    if options.chat_options and not use_chat:
        reason = "chat=false" if has_template else f"{folder} has no chat template"
        raise ValueError(f"task {task!r}: chat_options={dict(options.chat_options)}, but {reason}")
    eos_id = _special_id(tokenizer, settings, config, "eos")
    if eos_id is None:
        raise ValueError(f"{folder} names no end-of-sequence token (eos_token in tokenizer_config.json)")
    pad_id = _special_id(tokenizer, settings, config, "pad")
    size = int(config.get("vocab_size") or tokenizer.get_vocab_size())
    chat = _load_chat(folder, task) if use_chat else None
    stops = tuple(sorted(_end_ids(folder, config) - {eos_id}))
    return TextTokenizer(tokenizer, chat, eos_id, eos_id if pad_id is None else pad_id, size, stops)


def prompt_ids(tokens: TextTokenizer, messages: Sequence[Message], chat_options: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of a prompt, ready for the response to follow. Raises ValueError where the chat template fails."""
    if tokens.chat is None:
        return tuple(tokens.tokenizer.encode("\n\n".join(message["content"] for message in messages)).ids)
    from jinja2 import TemplateError

    try:
        text = tokens.chat.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **chat_options
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template of {tokens.chat.name_or_path} makes no prompt: {error}") from error
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
