"""Rules that pick cells of a sweep: override keys with a value or values, matched on resolved configs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from harness.config.load import groups, leaves
from harness.config.schema import RunConfig
from harness.foundation.did_you_mean import nearest
from methods import METHODS

Rule = Mapping[str, Any]
OPEN = ("knobs.", "task.options.")
"""Beginnings of keys that the schema does not list."""


def check_rule(rule: Rule, name: str = "exclude") -> None:
    """Raises ValueError, one line, for a rule with an unknown key or choice. `name`: the field that it stands in."""
    if not rule:
        raise ValueError(f"{name}: an empty rule agrees with every cell")
    for key, value in rule.items():
        if key not in leaves(RunConfig) and not key.startswith(OPEN):
            raise ValueError(f"{name}: unknown key {key}; {nearest(key, leaves(RunConfig))}")
        for choice in map(str, value if isinstance(value, list) else [value]):
            if key in groups() and choice.removesuffix("+kv8") not in groups()[key]:
                raise ValueError(f"{name}: {key}={choice}: no such choice; {nearest(choice, groups()[key])}")
            if key == "method" and choice not in METHODS:
                raise ValueError(f"{name}: method={choice}: unknown; {nearest(choice, METHODS)}")


def read_rule(words: Sequence[str], name: str) -> Rule:
    """The rule of words KEY=VALUE or KEY=VALUE,VALUE. Raises ValueError, one line, for a key that comes twice, and as
    `check_rule`."""
    rule: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{name}={word}: KEY=VALUE or KEY=VALUE,VALUE is expected")
        if key in rule:
            raise ValueError(f"{name}={word}: {key} stands there twice; either of two values: {key}=VALUE,VALUE")
        rule[key] = [_value(value)] if value.startswith("[") else [_value(part) for part in value.split(",")]
    check_rule(rule, name)
    return rule


def _value(word: str) -> Any:
    """A number, true, false, null or list as such; other words as they are."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def in_words(rule: Rule) -> str:
    """Write a rule as overrides, with `|` between values."""
    return " ".join(f"{key}={'|'.join(map(_word, v)) if isinstance(v, list) else _word(v)}" for key, v in rule.items())


def matches(config: RunConfig, rule: Rule) -> bool:
    """Does a cell agree with all of a rule? Groups go by their names, values as they were resolved."""
    for key, wanted in rule.items():
        found = _found(config, key)
        choices = wanted if isinstance(wanted, list) else [wanted]
        if found not in choices and _word(found) not in map(_word, choices):
            return False
    return True


def values_of(configs: Iterable[RunConfig], key: str) -> list[str]:
    """Values of a key among cells, in words and in their order."""
    return list(dict.fromkeys(_word(_found(config, key)) for config in configs))


def open_keys(configs: Sequence[RunConfig]) -> list[str]:
    """The keys below OPEN that cells have: knobs of their parts, options of their tasks."""
    knobs = [f"knobs.{part}.{name}" for config in configs for part, own in config.knobs.items() for name in own]
    return list(dict.fromkeys([*knobs, *(f"task.options.{name}" for c in configs for name in c.task.options)]))


def _found(config: RunConfig, key: str) -> Any:
    """A cell's value of a key; of a group its name."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return getattr(found, "name", None) if is_dataclass(found) else found


def _word(value: Any) -> str:
    """Write a value as an override has it."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
