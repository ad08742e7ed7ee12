"""Rules that leave cells out of a sweep: override keys with a value or values, matched on resolved configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from harness.config.load import groups, leaves
from harness.config.schema import RunConfig
from harness.foundation.did_you_mean import nearest
from methods import METHODS

Rule = Mapping[str, Any]
OPEN = ("knobs.", "task.options.")


def check_rule(rule: Rule) -> None:
    """Raises ValueError, one line, for a rule with an unknown key or choice."""
    if not rule:
        raise ValueError("exclude: an empty rule would leave out every cell")
    for key, value in rule.items():
        if key not in leaves(RunConfig) and not key.startswith(OPEN):
            raise ValueError(f"exclude: unknown key {key}; {nearest(key, leaves(RunConfig))}")
        for choice in map(str, value if isinstance(value, list) else [value]):
            if key in groups() and choice.removesuffix("+kv8") not in groups()[key]:
                raise ValueError(f"exclude: {key}={choice}: no such choice; {nearest(choice, groups()[key])}")
            if key == "method" and choice not in METHODS:
                raise ValueError(f"exclude: method={choice}: unknown; {nearest(choice, METHODS)}")


def in_words(rule: Rule) -> str:
    """Write a rule as overrides, with `|` between values."""
    return " ".join(f"{key}={'|'.join(map(_word, v)) if isinstance(v, list) else _word(v)}" for key, v in rule.items())


def matches(config: RunConfig, rule: Rule) -> bool:
    """Does a cell agree with all of a rule? Groups go by their names, values as they were resolved."""
    for key, wanted in rule.items():
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        found = getattr(found, "name", None) if is_dataclass(found) else found
        choices = wanted if isinstance(wanted, list) else [wanted]
        if found not in choices and _word(found) not in map(_word, choices):
            return False
    return True


def _word(value: Any) -> str:
    """Write a value as an override has it."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
