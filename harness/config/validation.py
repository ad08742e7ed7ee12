"""Plain values validated into config dataclasses; whatever is wrong is said in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.foundation.did_you_mean import LONG, nearest

T = TypeVar("T")
SHOWN = 60
"""Characters of a wrong value in an error."""
EXPECTED = {
    "int_": "a whole number is expected",
    "float_": "a number is expected",
    "bool_": "true or false is expected",
    "string_type": "text is expected",
    "string_too_short": "some text is expected",
    "string_pattern": "a plain name is expected: letters, digits, '_', '-', '.', '+', spaces",
    "too_long": "fewer values are expected",
    "tuple_type": "a list is expected, such as [a,b]",
    "list_type": "a list is expected, such as [a,b]",
}
"""Beginning of pydantic's name of an error -> what it means."""
HINTS = {"trainer.steps": "; lowbit eval FOLDER evaluates without training"}
"""Key -> what follows an error about its value."""
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
"""Pydantic's names of errors about a key."""
BOUNDS = {
    "must be": "input should be",
    "at least": "greater than or equal to",
    "at most": "less than or equal to",
    "above": "greater than",
    "below": "less than",
}
"""Our words for pydantic's, replaced in this order."""


def parse(cls: type[T], values: dict[str, Any]) -> T:
    """Validate plain values into a frozen dataclass. Raises ValueError: field, value and what is valid, one line."""
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        raise ValueError(in_words(error, cls)) from None


def in_words(error: ValidationError, cls: type | None = None, prefix: str = "") -> str:
    """The first finding of pydantic in one line; `cls` is whose keys an unknown one is compared with. A key that is
    missing may be an unknown one beside it, misspelt: that one is named."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    if first["type"] in MISSING:
        first = next((e for e in found if e["type"] in UNKNOWN and e["loc"][:-1] == first["loc"][:-1]), first)
    place = first["loc"]
    if place[-1:] == ("int",):  # of `int | float`: the place of both, the words of the wider one
        place = place[:-1]
        first = next((e for e in found if e["loc"] == (*place, "float")), first)
    path = ".".join([prefix] * bool(prefix) + [str(p) for p in place if not str(p).startswith("function")])
    if first["type"] in UNKNOWN:
        known = leaves(cls) if cls else ()
        if entry := re.match(r"(.+?)\.\d+\.", path):  # of a list: its valid keys have its number, too
            known = [re.sub(rf"^{re.escape(entry[1])}\.", entry[0], name) for name in known]
        return f"unknown key {path}" + f"; {nearest_key(path, known)}" * bool(known)
    if first["type"] in MISSING:
        return f"{path} is missing"
    if first["type"] == "value_error":  # a dataclass's own check: its words name field, value and choices
        words = first["msg"].removeprefix("Value error, ")
        return f"{path}: {words}" if path else words
    if first["type"] in ("dataclass_type", "dict_type"):
        return f"{path}={_short(first['input'])}: keys with values are expected, such as {path}.KEY=VALUE"
    expected = next((words for kind, words in EXPECTED.items() if first["type"].startswith(kind)), None)
    if expected is None:
        expected = first["msg"][0].lower() + first["msg"][1:]
        for ours, theirs in BOUNDS.items():
            expected = expected.replace(theirs, ours)
    hint = HINTS.get(path, "") if first["type"].startswith(("greater", "less")) else ""
    return f"{path}={_short(first['input'])}: {expected}{hint}" if path else expected


def _short(value: Any) -> str:
    """A value as it is shown in an error: as it is written in an override, at most SHOWN characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Key that was probably meant: the same word in another group first; the groups where nothing is near."""
    word, keys = key.rpartition(".")[2], list(known)
    same = [name for name in keys if name.rpartition(".")[2] == word]
    hint = f"nearest: {', '.join(same)}" if same else nearest(key, keys)
    if hint.startswith("nearest") or len(keys) <= LONG:
        return hint
    return f"valid: {', '.join(name for name in keys if '.' not in name)}; lowbit run --dry-run shows what is in them"


@cache
def _adapter(cls: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(cls)


def element(kind: Any) -> Any:
    """Annotation of a tuple's or list's elements; of anything else its own."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) in (tuple, list) else kind


@cache
def leaves(cls: type, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of every field of a config dataclass."""
    names: list[str] = []
    for name, kind in typing.get_type_hints(cls).items():
        if name.startswith("__"):
            continue
        names.append(prefix + name)
        is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
        for inner in typing.get_args(kind) if is_union else (element(kind),):
            if dataclasses.is_dataclass(inner):
                names += leaves(typing.cast(type, inner), f"{prefix}{name}.")
    return tuple(names)
